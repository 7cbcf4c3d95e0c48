"""The TGI dialect: Hugging Face's own client over sockets, the shapes of replies, and TGI's refusals."""

import asyncio
import json
from itertools import product

import httpx
import huggingface_hub
import pytest
from fastapi import FastAPI
from huggingface_hub import InferenceClient
from huggingface_hub.errors import GenerationError, ValidationError
from pydantic import BaseModel

from fwk.errors import EngineDead, RequestFailed
from fwk.interfaces.dialect import DialectContext
from fwk.types import GrammarRequest
from fwk_server.openai.dialect import OpenAIDialect
from fwk_server.tgi.dialect import TGIDialect
from fwk_server.tgi.elsewhere import ROUTES

TEXT = "Grüße 0 🙂!"  # what the scripted frontend says
LEN = len(TEXT.encode())


@pytest.fixture
def app(frontend, whole_app) -> FastAPI:
    """Both dialects, as a server routes them."""
    context = DialectContext(frontend)
    return whole_app(OpenAIDialect(context), TGIDialect(context))


def body_of(**parameters):
    return {"inputs": "Hi", "parameters": parameters}


@pytest.fixture
def post(client):
    async def post(path="/generate", status=200, **parameters):
        reply = await client.post(path, json=body_of(**parameters))
        assert reply.status_code == status, reply.text
        return reply.json()

    return post


@pytest.fixture
def stream(client):
    async def stream(path="/generate_stream", **parameters):
        reply = await client.post(path, json=body_of(**parameters) | ({"stream": True} if path == "/" else {}))
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, rest = reply.text.split("\n\n")
        assert rest == ""
        assert all(event.startswith("data:") for event in events)
        return [json.loads(event.removeprefix("data:")) for event in events]

    return stream


def sampling(frontend):
    return frontend.items[-1].sampling


@pytest.mark.parametrize(
    ("path", "body"),
    [*((path, {"inputs": "Hi"}) for path in ("/generate", "/generate_stream", "/")), ("/generate", {"text": "Hi"})],
)
async def test_a_body_that_names_another_model_is_refused(client, frontend, path, body):
    reply = await client.post(path, json={**body, "model": "nobody's"})
    assert (reply.status_code, frontend.items) == (404, [])
    reply = await client.post(path, json={**body, "model": frontend.card.name})
    assert reply.status_code == 200


# Hugging Face's client.


@pytest.mark.parametrize("path", ["", "/generate"])
async def test_the_hub_client_generates(base_url, frontend, path):
    client = InferenceClient(base_url=base_url + path)
    assert await asyncio.to_thread(client.text_generation, "Hi", max_new_tokens=50) == TEXT
    output = await asyncio.to_thread(
        client.text_generation, "Hi", details=True, decoder_input_details=True, top_n_tokens=2, seed=7, do_sample=True
    )
    assert isinstance(output, huggingface_hub.TextGenerationOutput)
    details = output.details
    assert (output.generated_text, details.finish_reason, details.generated_tokens) == (TEXT, "eos_token", LEN)
    assert [token.id for token in details.tokens] == list(TEXT.encode())
    assert [(token.id, token.logprob) for token in details.prefill] == [(256, None), (72, -0.572), (105, -0.605)]
    assert "".join(token.text for token in details.tokens) == TEXT
    assert [len(top) for top in details.top_tokens] == [2] * LEN
    assert details.seed == 7


async def test_the_hub_client_streams(base_url):
    client = InferenceClient(base_url=base_url)

    def run(**arguments):
        return list(client.text_generation("Hi", stream=True, max_new_tokens=50, **arguments))

    assert "".join(await asyncio.to_thread(run)) == TEXT
    outputs = await asyncio.to_thread(run, details=True)
    assert [output.index for output in outputs] == list(range(1, LEN + 1))
    assert [output.token.id for output in outputs] == list(TEXT.encode())
    assert [output.generated_text for output in outputs] == [None] * (LEN - 1) + [TEXT]
    last = outputs[-1].details
    assert (last.finish_reason, last.generated_tokens, last.input_length) == ("eos_token", LEN, 3)


async def test_the_hub_client_knows_the_errors(base_url, frontend):
    client = InferenceClient(base_url=base_url)
    with pytest.raises(ValidationError, match="`top_p` must be > 0"):
        await asyncio.to_thread(client.text_generation, "Hi", top_p=1.5)
    frontend.script = lambda item: [RequestFailed("bad luck")]
    with pytest.raises(GenerationError, match="bad luck"):
        await asyncio.to_thread(client.text_generation, "Hi")
    with pytest.raises(GenerationError, match="bad luck"):
        await asyncio.to_thread(lambda: list(client.text_generation("Hi", stream=True)))


async def test_the_hub_client_reads_the_info(base_url):
    info = await asyncio.to_thread(InferenceClient(provider="hf-inference").get_endpoint_info, model=base_url)
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("tiny", 4096, 4095)


OF_SEEDS = (
    "/get_model_name /tokens /healthz /health /get_server_info /server_info /flush_cache /parse_function_call "
    "/separate_reasoning /encode /get_model_info /generate /generate_stream /abort_request /get_load /token_load "
    "/update_weights_from_tensor /release_memory_occupation /start_profile /load_lora_adapter /open_session "
    "/configure_logging /worker_status /tokenizer/encode /reset_prefix_cache /pause /invocations /v1/audio/speech"
)


async def test_paths_of_other_servers_are_served_or_say_what_does_it_here(app, client):
    served = {route.path for route in app.routes}
    assert not served & ROUTES.keys()
    for path in OF_SEEDS.split():
        assert path in served | ROUTES.keys(), path
    for path, said in ROUTES.items():
        for method in ("GET", "POST"):
            reply = await client.request(method, path)
            assert (reply.status_code, reply.json()["error"]["message"]) == (404, said)
        assert said.startswith(f"{path} is not served here: ")
    assert (await client.get("/no_such_path")).json()["error"]["message"] == "Not Found"
    assert (await client.get("/get_model_name")).json() == {"model_name": "tiny"}


# Parameters.


async def test_output_is_greedy_unless_a_request_says_otherwise(post, frontend):
    frontend.default_sampling = {"temperature": 0.7, "top_p": 0.5}
    await post()
    assert (sampling(frontend).temperature, sampling(frontend).seed, sampling(frontend).top_p) == (0.0, None, 1.0)
    assert sampling(frontend).logprobs is None
    for parameters in ({"do_sample": True}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}):
        await post(**parameters)
        assert sampling(frontend).temperature == parameters.get("temperature", 1.0)
        assert sampling(frontend).seed is not None
    await post(temperature=1.0)
    assert sampling(frontend).temperature == 0.0


async def test_output_is_as_the_operator_prefers_it(post, frontend):
    frontend.preferred_sampling = {"temperature": 0.7, "max_tokens": 7, "min_p": 0.1, "top_p": 1.0}
    await post()
    found = sampling(frontend)
    assert (found.temperature, found.max_tokens, found.min_p, found.top_p) == (0.7, 7, 0.1, 1.0)
    await post(do_sample=False, max_new_tokens=9)
    assert (sampling(frontend).temperature, sampling(frontend).max_tokens) == (0.0, 9)
    await post(max_new_tokens=None, temperature=1.5)
    assert (sampling(frontend).temperature, sampling(frontend).max_tokens) == (1.5, None)


async def test_grammars_are_the_engines(post, frontend):
    frontend.grammar_kinds = frozenset({"json_schema", "regex"})
    schema = {"type": "object"}
    for value in (
        {"type": "json", "value": schema},
        {"type": "json", "value": '{"type":"object"}'},
        {"type": "json_schema", "value": {"name": "it", "schema": schema}},
    ):
        await post(grammar=value)
        assert sampling(frontend).grammar == GrammarRequest("json_schema", '{"type":"object"}')
    await post(grammar={"type": "regex", "value": "a+"})
    assert sampling(frontend).grammar == GrammarRequest("regex", "a+")
    frontend.grammar_kinds = frozenset()
    assert "no grammar backend" in (await post(grammar={"type": "regex", "value": "a"}, status=422))["error"]


async def test_what_other_apis_have_is_refused_only_where_it_asks_for_something(post, frontend):
    await post(n=1, presence_penalty=0, echo=False, regular_constraint="", user="me", model="tiny", my_own=3)
    assert len(frontend.items) == 1


async def test_parameters_reach_the_engine(post, frontend):
    await post(
        max_new_tokens=5, do_sample=True, temperature=0.5, top_k=7, top_p=0.9, repetition_penalty=1.2,
        frequency_penalty=0.3, seed=2**64 - 1, stop=["a", "b"], details=True, top_n_tokens=3,
    )  # fmt: skip
    got = sampling(frontend)
    assert (got.max_tokens, got.temperature, got.top_k, got.top_p) == (5, 0.5, 7, 0.9)
    assert (got.repetition_penalty, got.frequency_penalty, got.stop) == (1.2, 0.3, ["a", "b"])
    assert got.seed % 2**64 == 2**64 - 1
    assert (got.logprobs, got.prompt_logprobs, got.include_stop_str_in_output) == (3, None, True)


async def test_the_number_of_tokens(post, client, frontend):
    await post()
    assert sampling(frontend).max_tokens == 100
    await post(max_new_tokens=None)
    assert sampling(frontend).max_tokens is None  # the frontend fills in what there is room for
    await client.post("/generate", json={"inputs": "Hi"})
    assert sampling(frontend).max_tokens == 100


async def test_seeds_are_told(post, frontend):
    drawn = (await post(details=True, do_sample=True))["details"]["seed"]
    assert drawn == sampling(frontend).seed
    assert (await post(details=True))["details"]["seed"] is None


async def test_the_prompt_is_cut_on_the_left(post, client, frontend):
    await client.post("/generate", json={"inputs": "abcdef", "parameters": {"truncate": 2}})
    assert frontend.items[-1].prompt_token_ids == list(b"ef")
    await client.post("/generate", json={"inputs": "ab", "parameters": {"truncate": 100}})
    assert frontend.items[-1].prompt_token_ids == [256, *b"ab"]


async def test_the_full_text_begins_with_the_prompt(post, stream):
    assert (await post(return_full_text=True))["generated_text"] == "Hi" + TEXT
    assert (await stream(return_full_text=True))[-1]["generated_text"] == "Hi" + TEXT


@pytest.mark.parametrize(
    ("finish", "stop_reason", "expected"),
    [
        ("length", None, "length"),
        ("stop", None, "eos_token"),
        ("stop", 33, "eos_token"),
        ("stop", "!", "stop_sequence"),
    ],
)
async def test_finish_reasons(post, stream, frontend, fake, finish, stop_reason, expected):
    frontend.script = lambda item: fake.interleaved(fake.deltas_of(item, "ab!", finish=finish, stop_reason=stop_reason))
    assert (await post(details=True))["details"]["finish_reason"] == expected
    assert (await stream())[-1]["details"]["finish_reason"] == expected


async def test_the_best_of_several(post, frontend, fake):
    """Scores of the script fall with the token's id: 'a' is likelier than 'z'."""

    def script(item):
        return fake.interleaved(*(fake.deltas_of(item, text, index=i) for i, text in enumerate(("zz", "aaa", "mm"))))

    frontend.script = script
    reply = await post(best_of=3, do_sample=True, details=True)
    assert frontend.items[-1].n == 3
    assert reply["generated_text"] == "aaa"
    assert [other["generated_text"] for other in reply["details"]["best_of_sequences"]] == ["zz", "mm"]
    assert reply["details"]["generated_tokens"] == 3
    assert (await post(best_of=3, do_sample=True))["generated_text"] == "aaa"


async def test_special_tokens_are_marked(post, stream, frontend, fake):
    def script(item):
        (deltas,) = [fake.deltas_of(item, "ab")]
        deltas[-1].token_ids, deltas[-1].text = [fake.EOS], ""
        deltas[-1].logprobs = [fake.score(fake.EOS, 0)] if item.sampling.logprobs is not None else None
        return fake.interleaved(deltas)

    frontend.script = script
    reply = await post(details=True)
    assert reply["generated_text"] == "a"
    assert [(t["text"], t["special"]) for t in reply["details"]["tokens"]] == [("a", False), ("<eos>", True)]
    assert [(e["token"]["text"], e["token"]["special"]) for e in await stream()] == [("a", False), ("<eos>", True)]


async def test_several_tokens_at_once_are_several_events(stream, frontend, fake):
    def script(item):
        deltas = fake.deltas_of(item, "abcd")
        first, last = deltas[0], deltas[-1]
        first.token_ids, first.text, first.logprobs = [*b"abc"], "abc", [fake.score(i, 0) for i in b"abc"]
        return [[first], [last]]

    frontend.script = script
    events = await stream()
    assert [(e["index"], e["token"]["text"]) for e in events] == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert events[-1]["generated_text"] == "abcd"


async def test_the_compatible_route(client, stream):
    reply = await client.post("/", json=body_of())
    assert [item["generated_text"] for item in reply.json()] == [TEXT]
    assert (await stream("/"))[-1]["generated_text"] == TEXT


async def test_fields_of_logits_processors(post, frontend):
    class Params(BaseModel):
        boost: int | None = None

    frontend.params = [Params]
    await post(boost=3)
    assert sampling(frontend).extra == {"boost": 3}
    error = await post(boost="x", status=422)
    assert "boost" in error["error"]


# Refusals and failures.


WRONG = [
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_n_tokens": 21}, "`top_n_tokens` must be >= 0 and <= 20. Given: 21"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"max_new_tokens": 2.5}, "parameters.max_new_tokens"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 4096. Given: 0"),
    ({"truncate": 4096}, "`truncate` must be strictly positive and less than 4096. Given: 4096"),
    ({"best_of": 0}, "`best_of` must be > 0 and <= 128. Given: 0"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"seed": -1}, "parameters.seed"),
    ({"seed": 2**64}, "parameters.seed"),
    ({"stop": "a"}, "parameters.stop"),
    ({"stop": ["a"] * 17}, "at most 16 stop strings"),
    ({"stop": [""]}, "a stop string must have"),
    ({"repetition_penalty": 1e9}, "repetition_penalty must be between"),
    ({"watermark": True}, "`watermark` needs a logits processor"),
    ({"typical_p": 0.5}, "`typical_p` needs a logits processor"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"grammar": {"type": "xml", "value": "a"}}, "`grammar.type` must be json, json_schema or regex, not 'xml'"),
    ({"grammar": {"type": "regex", "value": {}}}, "grammar.value must be a string"),
    ({"grammar": {"type": "json", "value": 3}}, "grammar.value must be a JSON schema"),
    ({"regular_constraint": "a+"}, "`regular_constraint` is no parameter of this API: give grammar"),
    ({"guided_json": {"type": "object"}}, "`guided_json` is no parameter of this API: give grammar"),
    ({"min_p": 0.1}, "`min_p` is no parameter of this API: /v1/completions reads it"),
    ({"max_tokens": 3}, "`max_tokens` is no parameter of this API"),
    ({"adapter_id": "a"}, "`adapter_id` is not supported"),
    ({"do_sample": "yes"}, "parameters.do_sample"),
]


async def test_wrong_parameters(post, frontend):
    for path, (parameters, message) in product(("/generate", "/generate_stream", "/"), WRONG):
        if path == "/generate_stream" and parameters.get("best_of", 1) > 1:
            message = "`best_of` != 1 is not supported when streaming tokens"
        error = await post(path, status=422, **parameters)
        assert error["error"].startswith("Input validation error: ")
        assert message in error["error"]
        assert error["error_type"] == "validation"
        assert not frontend.items, (path, parameters)


async def test_prefill_details_are_for_whole_replies(post):
    error = await post("/generate_stream", status=422, decoder_input_details=True)
    assert "`decoder_input_details` == true is not supported when streaming tokens" in error["error"]


async def test_wrong_bodies(client):
    for content, status, message in (
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"parameters": {}}', 422, "inputs"),
        (b'{"inputs": ["a"]}', 422, "inputs"),
        (b'{"inputs": ""}', 422, "`inputs` cannot be empty"),
        (b'{"inputs": "a", "parameters": []}', 422, "parameters"),
        (b'{"inputs": "\\ud800"}', 400, "not valid JSON"),
    ):
        reply = await client.post("/generate", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == status, content
        error = reply.json()
        assert set(error) == {"error", "error_type"}
        assert message in error["error"]
        assert error["error_type"] == "validation"


async def test_a_long_prompt_names_the_field(client):
    reply = await client.post("/generate", json={"inputs": "a" * 5000})
    assert reply.status_code == 422
    assert reply.json()["error"].startswith("Input validation error: inputs")


async def test_other_kinds_of_content_are_refused(client):
    reply = await client.post("/generate", content=b"{}", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    assert "application/json" in reply.json()["error"]


async def test_failures_have_a_status_before_the_reply(post, frontend):
    frontend.script = lambda item: [RequestFailed("bad")]
    assert await post(status=424) == {"error": "Request failed during generation: bad", "error_type": "generation"}
    frontend.script = lambda item: [EngineDead("the engine stopped")]
    assert await post(status=503) == {"error": "the engine stopped", "error_type": "unavailable"}


@pytest.mark.parametrize(
    ("failure", "kind"), [(RequestFailed("bad"), "generation"), (EngineDead("bad"), "unavailable")]
)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_failures_are_the_last_event_of_a_stream(stream, frontend, fake, num_tokens, failure, kind):
    frontend.script = lambda item: [*fake.interleaved(fake.deltas_of(item, "abc"))[:num_tokens], failure]
    *events, last = await stream()
    assert len(events) == num_tokens
    assert "bad" in last["error"]
    assert last["error_type"] == kind


@pytest.mark.parametrize("finish", ["error", "abort"])
async def test_a_failed_sequence_fails_the_request(post, stream, frontend, fake, finish):
    def script(item):
        deltas = fake.deltas_of(item, "ab", finish=finish)
        deltas[-1].error = "its own fault"
        return fake.interleaved(deltas)

    frontend.script = script
    assert "its own fault" in (await post(status=424))["error"]
    assert "its own fault" in (await stream())[-1]["error"]


async def test_errors_of_other_routes_keep_their_shape(client):
    assert (await client.post("/v1/completions", json={"prompt": 5})).json()["error"]["param"] == "prompt"
    assert "error_type" not in (await client.get("/nothing")).json()


@pytest.mark.sweep
async def test_a_client_that_goes_away_aborts(base_url, frontend, fake):
    frontend.script = lambda item: [*fake.interleaved(fake.deltas_of(item, "ab"))[:1], 30.0]
    for path in ("/generate", "/generate_stream"):
        before = frontend.num_aborted
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(base_url + path, json=body_of(), timeout=0.3)
        for _ in range(200):
            if frontend.num_aborted > before:
                break
            await asyncio.sleep(0.01)
        assert frontend.num_aborted == before + 1
