"""llama.cpp's dialect: the shapes of replies, its names of fields, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
from fastapi import FastAPI

from fwk.interfaces.dialect import DialectContext, Infill
from fwk.interfaces.parser import ParserContext
from fwk_kit.testing.fake_frontend import BOS, deltas_of
from fwk_parsers.hermes.parser import HermesParser
from fwk_server.llamacpp.dialect import LlamaCppDialect

TEXT = "Grüße 0 🙂!"
IDS = list(TEXT.encode())


@pytest.fixture
def app(frontend, whole_app) -> FastAPI:
    return whole_app(LlamaCppDialect(DialectContext(frontend)))


@pytest.fixture
def post(client):
    async def post(path="/completion", status=200, **fields):
        reply = await client.post(path, json=fields)
        assert reply.status_code == status, reply.text
        return reply.json()

    return post


@pytest.fixture
def infills(frontend):
    """The scripted tokenizer with tokens for text in the middle."""

    def infill(prefix, suffix, files=(), start=""):
        made = f"{''.join(name + text for name, text in files)}<{prefix}|{suffix}>{start}"
        return Infill(list(made.encode()), [7])

    frontend.text.infill = infill
    return frontend


def sampling(frontend):
    return frontend.items[-1].sampling


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_a_prompt_is_completed(post, frontend, path):
    reply = await post(path, prompt="Hi", return_tokens=True)
    assert (reply["content"], reply["tokens"], reply["stop"], reply["stop_type"]) == (TEXT, IDS, True, "eos")
    assert (reply["tokens_predicted"], reply["tokens_evaluated"], reply["prompt"]) == (len(IDS), 3, "<bos>Hi")
    assert reply["timings"]["prompt_n"] + reply["timings"]["cache_n"] == 3
    assert reply["timings"]["predicted_n"] == len(IDS)
    assert sampling(frontend).max_tokens is None  # as many as there is room for
    assert (await post(prompt="Hi", n_predict=-1))["tokens"] == []
    assert sampling(frontend).max_tokens is None


async def test_a_stream_ends_with_a_whole_account(client):
    reply = await client.post("/completion", json={"prompt": "Hi", "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, rest = reply.text.split("\n\n")
    assert rest == ""
    *chunks, last = (json.loads(event.removeprefix("data: ")) for event in events)
    assert "".join(chunk["content"] for chunk in chunks) == TEXT
    assert [token for chunk in chunks for token in chunk["tokens"]] == IDS
    assert not any(chunk["stop"] for chunk in chunks)
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", len(IDS))


async def test_several_prompts_make_an_array(post, frontend):
    replies = await post(prompt=["a", "b"], n_predict=4)
    assert [reply["index"] for reply in replies] == [0, 1]
    assert [item.prompt_token_ids for item in frontend.items] == [[BOS, 97], [BOS, 98]]
    assert {reply["stop_type"] for reply in replies} <= {"limit", "eos"}
    await post(prompt=["a", 98, "c"])
    assert frontend.items[-1].prompt_token_ids == [BOS, 97, 98, 99]
    await post(prompt=[97, 98])
    assert frontend.items[-1].prompt_token_ids == [97, 98]


async def test_fields_have_llama_cpps_names(post, frontend):
    bias = [[104, -1.5], ["ab", 2], [105, False]]
    reply = await post(
        prompt="Hi", n_predict=9, repeat_penalty=1.5, repeat_last_n=-1, seed=-1, logit_bias=bias, n_probs=2, top_k=0
    )
    params = sampling(frontend)
    assert (params.max_tokens, params.repetition_penalty, params.seed, params.top_k) == (9, 1.5, None, 0)
    assert params.logit_bias == {104: -1.5, 97: 2.0, 98: 2.0, 105: -100.0}
    first = reply["completion_probabilities"][0]
    assert (first["id"], first["bytes"], len(first["top_logprobs"])) == (IDS[0], [IDS[0]], 2)
    assert reply["generation_settings"]["repeat_penalty"] == 1.5
    frontend.grammar_kinds = frozenset({"ebnf"})
    await post(prompt="Hi", grammar='root ::= "a"', repeat_last_n=64, repeat_penalty=1.0)
    assert sampling(frontend).grammar.kind == "ebnf"


async def test_samplers_that_are_not_named_are_off(post, frontend):
    frontend.default_sampling = {"top_p": 0.9, "min_p": 0.1, "temperature": 0.5}
    await post(prompt="Hi", samplers=["top_k", "top_p", "infill"], top_k=40, top_p=0.99, min_p=0.2)
    params = sampling(frontend)
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (40, 0.99, 0.0, 1.0)
    await post(prompt="Hi")
    assert (sampling(frontend).top_p, sampling(frontend).min_p, sampling(frontend).temperature) == (0.9, 0.1, 0.5)


async def test_only_the_fields_a_client_wants(post):
    reply = await post(prompt="Hi", response_fields=["content", "timings/predicted_n", "nothing/such"])
    assert reply == {"content": TEXT, "predicted_n": len(IDS)}


async def test_a_prompt_may_only_be_computed(post, frontend):
    reply = await post(prompt="Hi", n_predict=0, return_tokens=True)
    assert (reply["content"], reply["tokens"], reply["tokens_predicted"]) == ("", [], 0)
    assert sampling(frontend).max_tokens == 1


async def test_time_ends_a_reply_after_its_first_line(post, client, frontend):
    def slow(item):
        for number, delta in enumerate(deltas_of(item, "one\ntwo\nthree")):
            yield from [0.02] if number > 5 else []
            yield [delta]

    frontend.script = slow
    reply = await post(prompt="Hi", t_max_predict_ms=30)
    assert reply["content"].startswith("one\n")
    assert len(reply["content"]) < len("one\ntwo\nthree")
    assert reply["stop_type"] == "limit"
    streamed = await client.post("/completion", json={"prompt": "Hi", "t_max_predict_ms": 30, "stream": True})
    last = json.loads(streamed.text.rstrip().rsplit("data: ", 1)[1])
    assert (last["stop"], last["stop_type"]) == (True, "limit")


async def test_text_in_the_middle(post, infills):
    reply = await post(
        "/infill",
        input_prefix="a",
        input_suffix="b",
        input_extra=[{"filename": "x.py", "text": "X"}],
        prompt="c",
        n_predict=8,
        samplers=["top_k", "top_p", "infill"],
        t_max_prompt_ms=500,
        t_max_predict_ms=1000,
        n_indent=0,
    )
    assert reply["content"]
    item = infills.items[-1]
    assert bytes(item.prompt_token_ids).decode() == "x.pyX<a|b>c"
    assert item.sampling.stop_token_ids == [7]


async def test_wrong_bodies_are_refused_with_a_sentence(post, frontend):
    for path, fields, sentence in (
        ("/completion", {}, "prompt is required"),
        ("/completion", {"prompt": 3}, "prompt must be"),
        ("/completion", {"prompt": "a", "n_predict": -2}, "max_tokens|n_predict"),
        ("/completion", {"prompt": "a", "logit_bias": [[1]]}, r"logit_bias\[0\] must be a pair"),
        ("/completion", {"prompt": "a", "samplers": ["xyz"]}, "samplers: 'xyz' is not one of"),
        ("/completion", {"prompt": "a", "samplers": [{}]}, "samplers: .* is not one of"),
        ("/completion", {"prompt": "a", "n_keep": 5}, "n_keep is not supported"),
        ("/completion", {"prompt": "a", "mirostat": 2}, "mirostat is not supported"),
        ("/completion", {"prompt": "a", "response_fields": [3]}, "response_fields must be a string"),
        ("/infill", {"input_suffix": "b"}, "input_prefix is required"),
        ("/infill", {"input_prefix": "a", "input_suffix": 3}, "input_suffix must be a string"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}, r"input_extra\[0\].text must be"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "no tokens for text in the middle"),
        ("/apply-template", {}, "messages"),
    ):
        error = (await post(path, 400, **fields))["error"]
        assert (error["code"], error["type"]) == (400, "invalid_request_error")
        assert re.search(sentence, error["message"]), error
        assert frontend.items == []


async def test_templates_and_props(post, client, frontend):
    messages = [{"role": "user", "content": "Hi"}]
    assert "Hi" in (await post("/apply-template", messages=messages))["prompt"]
    assert (await post("/apply-template", 404, messages=messages, model="nobody"))["error"]["param"] == "model"
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    frontend.tool_parser = lambda tools, tail="", is_forced=False: HermesParser(ParserContext(tools, tail))
    await post("/apply-template", messages=messages, tools=tools)
    assert frontend.text.seen.tools == tools
    frontend.text.shows_tools = False
    assert "get_weather" in (await post("/apply-template", messages=messages, tools=tools))["prompt"]
    assert (
        "get_weather"
        not in (await post("/apply-template", messages=messages, tools=tools, tool_choice="none"))["prompt"]
    )
    props = (await client.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == frontend.card.max_model_len


@pytest.mark.parametrize("field", [{"return_hidden_states": True}, {"stream_options": {"include_usage": True}}])
async def test_what_is_for_other_routes_is_refused_by_its_name(client, frontend, field):
    reply = await client.post("/completion", json={"prompt": "Hi", "stream": True, **field})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], frontend.items) == (400, next(iter(field)), [])
    assert " is for /v1/completions" in error["message"]
