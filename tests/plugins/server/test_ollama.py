"""Ollama's dialect, asked by its own Python client."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from tests.helpers.lazy import lazy

from fwk.interfaces.dialect import DialectContext, Infill
from fwk.interfaces.loader import Checkpoint, StoredTensor
from fwk.interfaces.parser import ParserContext
from fwk.interfaces.served_weights import ServedWeights
from fwk_parsers.json.parser import JsonParser
from fwk_parsers.think.parser import ThinkParser
from fwk_server.ollama.dialect import OllamaDialect

ollama = lazy("ollama")

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def app(frontend, app_of) -> FastAPI:
    return app_of(OllamaDialect(DialectContext(frontend)))


@pytest.fixture
async def sdk(base_url):
    client = ollama.AsyncClient(host=base_url)
    yield client
    await client._client.aclose()


async def test_a_chat_whole_and_streamed(sdk, frontend):
    whole = await sdk.chat("tiny:latest", HI, options={"num_predict": 40, "repeat_penalty": 1.2})
    assert whole.message.content == "Gr\u00fc\u00dfe 0 \U0001f642!"
    assert (whole.done_reason, whole.eval_count) == ("stop", len(whole.message.content.encode()))
    assert frontend.items[0].sampling.repetition_penalty == 1.2
    streamed = [piece async for piece in await sdk.chat("tiny", HI, stream=True)]
    assert "".join(piece.message.content for piece in streamed) == whole.message.content
    assert [piece.done for piece in streamed] == [False] * (len(streamed) - 1) + [True]


async def test_tools_and_thinking(sdk, frontend, fake, base_url):
    frontend.tool_parser = lambda tools, tail="", is_forced=False: JsonParser(ParserContext(tools, tail))
    frontend.reasoning_parser = lambda tail="": ThinkParser(ParserContext((), tail))
    text = '<think>hm</think>{"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": {}}'
    frontend.script = lambda item: [[delta] for delta in fake.deltas_of(item, text)]
    whole = await sdk.chat("tiny", HI, tools=[TOOL])
    assert whole.message.thinking == "hm"
    assert [dict(call.function.arguments) for call in whole.message.tool_calls] == [{"a": 1}, {}]
    streamed = [piece async for piece in await sdk.chat("tiny", HI, tools=[TOOL], stream=True)]
    calls = [call for piece in streamed for call in piece.message.tool_calls or []]
    assert [dict(call.function.arguments) for call in calls] == [{"a": 1}, {}]
    async with httpx.AsyncClient(base_url=base_url) as http:
        lines = (await http.post("/api/chat", json={"messages": HI, "tools": [TOOL]})).text.splitlines()
    told = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
    assert [call["function"]["index"] for call in told] == [0, 1], "by which Go's client tells calls apart"
    assert "".join(piece.message.thinking or "" for piece in streamed) == "hm"
    turns = [*HI, whole.message, {"role": "tool", "tool_name": "add", "content": "1"}]
    assert (await sdk.chat("tiny", turns)).done


async def test_a_prompt_in_a_schema_and_raw(sdk, frontend):
    frontend.grammar_kinds = frozenset({"json_schema", "json_object"})
    await sdk.generate("tiny", "Hi", format={"type": "object"})
    assert frontend.items[0].sampling.grammar.kind == "json_schema"
    await sdk.generate("tiny", "Hi", raw=True)
    assert bytes(frontend.items[1].prompt_token_ids[1:]) == b"Hi"
    assert (await sdk.generate("tiny")).done_reason == "load"


async def test_models_and_errors(sdk):
    assert [model.model for model in (await sdk.list()).models] == ["tiny"]
    assert "tools" in (await sdk.show("tiny")).capabilities
    assert (await sdk.ps()).models[0].model == "tiny"
    with pytest.raises(ollama.ResponseError, match="not served") as caught:
        await sdk.chat("other", HI)
    assert caught.value.status_code == 404


async def test_log_probabilities_of_the_answers_tokens(sdk, frontend):
    """Each of the answer's tokens once, whole and streamed alike."""
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = await sdk.chat("tiny", HI, **asked)
    assert len(whole.logprobs) == len(whole.message.content.encode())  # a token is a byte here
    assert whole.logprobs[0].token == whole.message.content[0]
    assert all(len(entry.top_logprobs) == 2 for entry in whole.logprobs)
    streamed = [piece async for piece in await sdk.chat("tiny", HI, stream=True, **asked)]
    told = [entry for piece in streamed for entry in piece.logprobs or []]
    assert [entry.model_dump() for entry in told] == [entry.model_dump() for entry in whole.logprobs]
    generated = await sdk.generate("tiny", "Hi", logprobs=True)
    assert len(generated.logprobs) == len(whole.logprobs)
    assert (await sdk.chat("tiny", HI)).logprobs is None
    with pytest.raises(ollama.ResponseError, match="top_logprobs"):
        await sdk.chat("tiny", HI, logprobs=True, top_logprobs=21)


async def test_a_body_of_any_kind_unless_a_page_sent_it(base_url):
    """As the documentation's curl sends it, and clients that name no kind; a page could send these to any server."""
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": false}'
    async with httpx.AsyncClient(base_url=base_url) as http:
        for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}):
            assert (await http.post("/api/chat", content=body, headers=headers)).status_code == 200, headers
            for page in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
                refused = await http.post("/api/chat", content=body, headers=headers | page)
                assert refused.status_code == 415, (headers, page)


async def test_options_that_say_nothing_here_are_ignored_and_the_log_says_so_once(sdk, frontend, caplog):
    options = {"num_thread": 8, "num_gpu": 1, "use_mmap": True, "num_keep": 5, "repeat_last_n": 64, "numa": None}
    options |= {"num_ctx": 10**6, "temprature": 1, "top_k": 20.0, "num_predict": 3.0, "seed": 42, "typical_p": 0.7}
    for _ in range(2):
        await sdk.chat("tiny", HI, options=options)
    sampling = frontend.items[0].sampling
    assert (sampling.top_k, sampling.max_tokens, sampling.seed) == (20, 3, 42)
    lines = [record.getMessage() for record in caplog.records if "options." in record.getMessage()]
    assert len(lines) == 8
    assert "options.num_thread is ignored: how the model is loaded is the operator's to decide" in lines
    assert "options.temprature is ignored: it is unknown; did you mean temperature?" in lines
    assert any(line.startswith("options.num_ctx: 1000000 is more than") for line in lines)
    for wrong in ({"top_k": 2.5}, {"num_ctx": "long"}, {"temperature": -1}):
        with pytest.raises(ollama.ResponseError):
            await sdk.chat("tiny", HI, options=wrong)


async def test_models_are_described(sdk, frontend, base_url, tmp_path):
    """From the checkpoint: an empty digest or size is shown as nothing, or refused, by several clients."""
    tensor = StoredTensor(tmp_path / "model.safetensors", 8, 4_000, "BF16", (20, 100))
    tensor.path.write_bytes(b"x" * 5_000)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    checkpoint = SimpleNamespace(
        config=lambda: config, stored_tensors=lambda: {"w": tensor}, weight_files=lambda: [tensor.path]
    )
    checkpoint.weights_summary = partial(Checkpoint.weights_summary, checkpoint)
    frontend.__class__ = type("Described", (type(frontend),), {"served_weights": None})
    type(frontend).served_weights = ServedWeights.of("safetensors", checkpoint)
    [model] = (await sdk.list()).models
    assert (model.size, model.details.format, model.details.family) == (5_000, "safetensors", "llama")
    assert (model.details.parameter_size, model.details.quantization_level) == ("2.0K", "BF16")
    assert len(model.digest) == 64
    [loaded] = (await sdk.ps()).models
    assert (loaded.digest, loaded.context_length) == (model.digest, frontend.card.max_model_len)
    async with httpx.AsyncClient(base_url=base_url) as http:
        [raw] = (await http.get("/api/tags")).json()["models"]
    assert raw["capabilities"] == ["completion", "tools"]
    assert (raw["details"]["context_length"], raw["details"]["embedding_length"]) == (frontend.card.max_model_len, 64)
    told = await sdk.show("tiny:latest")
    assert told.details == model.details
    assert told.modelinfo["llama.context_length"] == frontend.card.max_model_len
    assert told.modelinfo["llama.block_count"] == 2
    tensor.path.write_bytes(b"y" * 6_000)
    type(frontend).served_weights = ServedWeights.of("safetensors", checkpoint)
    assert (await sdk.list()).models[0].digest != model.digest, "other weights"


async def test_routes_about_models(sdk, base_url):
    assert (await sdk.pull("tiny")).status == "success"
    assert [step.status async for step in await sdk.pull("tiny", stream=True)] == ["pulling manifest", "success"]
    for refused, status in (
        (sdk.pull("other"), 404),
        (sdk.copy("tiny", "other"), 400),
        (sdk.delete("tiny"), 400),
        (sdk.create("other", from_="tiny"), 400),
        (sdk.push("tiny"), 400),
    ):
        with pytest.raises(ollama.ResponseError, match=r"operator|registries") as caught:
            await refused
        assert caught.value.status_code == status
    async with httpx.AsyncClient(base_url=base_url) as http:
        version = (await http.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "editors refuse older ones"
    for kept, reason in ((0, "unload"), ("0s", "unload"), ("0h0m0s", "unload"), ("10s", "load"), (-1, "load")):
        assert (await sdk.chat("tiny", [], keep_alive=kept)).done_reason == reason, kept


async def test_vectors(sdk, frontend):
    frontend.card = replace(frontend.card, task="embed", embedding_size=4, max_model_len=8)
    reply = await sdk.embed("tiny", ["ab", "abcdefghijkl"])
    assert [vector[0] for vector in reply.embeddings] == [3, 8]
    assert frontend.embedded[1].token_ids[-1] == ord("l"), "the token that ends an input stays"
    assert (await sdk.embeddings("tiny", "ab")).embedding[0] == 3
    assert (await sdk.embed("tiny", "")).embeddings == []
    for wrong in ({"input": "a" * 5_000, "truncate": False}, {"input": "a", "dimensions": 2}):
        with pytest.raises(ollama.ResponseError):
            await sdk.embed("tiny", **wrong)


async def test_a_text_in_the_middle(sdk, frontend):
    assert "insert" not in (await sdk.show("tiny")).capabilities
    frontend.text.infill = lambda before, after, *more: Infill([7, *before.encode(), 8, *after.encode()], [9])
    assert "insert" in (await sdk.show("tiny")).capabilities, "editors ask for completions where it is"
    await sdk.generate("tiny", "a", suffix="b")
    assert frontend.items[0].prompt_token_ids == [7, ord("a"), 8, ord("b")]
    assert frontend.items[0].sampling.stop_token_ids == [9]
