"""Ollama's dialect, asked by its own Python client."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from tests.helpers.lazy import lazy

from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.parser import ParserContext
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


async def test_tools_and_thinking(sdk, frontend, fake):
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
