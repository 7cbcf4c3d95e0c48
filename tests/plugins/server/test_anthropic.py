"""Anthropic's dialect, asked by its own Python client."""

from __future__ import annotations

import json

import pytest
from fastapi import FastAPI
from tests.helpers.lazy import lazy

from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.parser import ParserContext
from fwk_parsers.json.parser import JsonParser
from fwk_parsers.think.parser import ThinkParser
from fwk_server.anthropic.dialect import AnthropicDialect

anthropic = lazy("anthropic")

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
TEXT = "Gr\u00fc\u00dfe 0 \U0001f642!"


@pytest.fixture
def app(frontend, app_of) -> FastAPI:
    return app_of(AnthropicDialect(DialectContext(frontend)))


@pytest.fixture
async def sdk(base_url):
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="sk-mine", max_retries=0) as client:
        yield client


async def test_a_message_whole_and_streamed(sdk, frontend):
    whole = await sdk.messages.create(model="tiny", max_tokens=64, messages=HI, system="Be kind.", stop_sequences=["x"])
    assert [(block.type, block.text) for block in whole.content] == [("text", TEXT)]
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
    assert whole.usage.output_tokens == len(TEXT.encode())
    item = frontend.items[0]
    assert (item.sampling.max_tokens, item.sampling.stop) == (64, ["x"])
    assert b"Be kind." in bytes(token for token in item.prompt_token_ids if token < 256)
    async with sdk.messages.stream(model="tiny", max_tokens=64, messages=HI) as stream:
        assert "".join([text async for text in stream.text_stream]) == TEXT
        last = await stream.get_final_message()
    assert (last.content[0].text, last.stop_reason) == (TEXT, "end_turn")
    assert last.usage.output_tokens == whole.usage.output_tokens


async def test_thinking_and_tools_whole_and_streamed(sdk, frontend, fake):
    frontend.tool_parser = lambda tools, tail="", is_forced=False: JsonParser(ParserContext(tools, tail))
    frontend.reasoning_parser = lambda tail="": ThinkParser(ParserContext((), tail))
    text = '<think>hm</think>{"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": {}}'
    frontend.script = lambda item: [[delta] for delta in fake.deltas_of(item, text)]
    asked = {"model": "tiny", "max_tokens": 99, "messages": HI, "tools": [TOOL]}
    whole = await sdk.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
    async with sdk.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "tool_use", "tool_use"]
        assert message.content[0].thinking == "hm"
        assert [block.input for block in message.content[1:]] == [{"a": 1}, {}]
        assert message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "1"} for block in whole.content[1:]]
    turns = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    assert (await sdk.messages.create(**asked | {"messages": turns})).type == "message"


async def test_an_answer_that_begins_with_the_last_message(sdk, frontend):
    turns = [*HI, {"role": "assistant", "content": "Well,"}]
    await sdk.messages.create(model="tiny", max_tokens=9, messages=turns)
    assert bytes(token for token in frontend.items[0].prompt_token_ids if token < 256).rstrip().endswith(b"Well,")


async def test_effort_and_format_of_the_answer(sdk, frontend):
    frontend.grammar_kinds = frozenset({"json_schema"})
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    keeps_all = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    asked = {"model": "tiny", "max_tokens": 9, "messages": HI, "extra_body": keeps_all}
    await sdk.messages.create(**asked, output_config=config, thinking={"type": "adaptive"})
    wanted = {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}
    assert frontend.text.seen.kwargs == wanted
    assert json.loads(frontend.items[0].sampling.grammar.source)["properties"] == schema["properties"]
    await sdk.messages.create(**asked, output_config={"effort": "high"})
    assert frontend.text.seen.kwargs == {"reasoning_effort": "high"}


async def test_tokens_are_counted(sdk, frontend):
    counted = await sdk.messages.count_tokens(model="tiny", messages=HI)
    whole = await sdk.messages.create(model="tiny", max_tokens=9, messages=HI)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert counted.input_tokens == len(frontend.items[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"model": "other"}, "NotFoundError", "not served"),
        ({"extra_body": {"temperature": 2.0}}, "BadRequestError", "temperature"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "BadRequestError", "role must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "BadRequestError", "'image'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "BadRequestError", "run by no one here"),
        ({"tool_choice": {"type": "any"}}, "BadRequestError", "there are no tools"),
        ({"thinking": {"type": "maybe"}}, "BadRequestError", "thinking.type"),
        ({"system": [{"type": "image"}]}, "BadRequestError", "reads text only"),
        ({"output_config": {"effort": "some"}}, "BadRequestError", "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "BadRequestError", "must be json_schema"),
        ({"extra_body": {"output_config": {"tone": "kind"}}}, "BadRequestError", "output_config.tone"),
        (
            {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
            "BadRequestError",
            "nothing is cleared",
        ),
    ],
)
async def test_what_is_refused(sdk, fields, error, said):
    with pytest.raises(getattr(anthropic, error), match=said) as caught:
        await sdk.messages.create(**{"model": "tiny", "max_tokens": 9, "messages": HI, **fields})
    assert caught.value.body["type"] == "error"


async def test_documents_that_are_text_are_read(sdk, frontend):
    blocks = [{"type": "text", "text": "page two"}]
    documents = [
        {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "one"}},
        {"type": "document", "context": "a scan", "source": {"type": "content", "content": blocks}},
    ]
    turns = [{"role": "user", "content": [*documents, {"type": "text", "text": "What do they say?"}]}]
    await sdk.messages.create(model="tiny", max_tokens=64, messages=turns)
    prompt = bytes(token for token in frontend.items[0].prompt_token_ids if token < 256)
    assert b"Notes\none\n\na scan\npage two\n\nWhat do they say?" in prompt


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ({"source": {"type": "base64", "media_type": "application/pdf", "data": ""}}, "a document of type 'base64'"),
        ({"source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}, "nothing is cited here"),
    ],
)
async def test_other_documents_are_refused(sdk, block, sentence):
    turns = [{"role": "user", "content": [{"type": "document", **block}]}]
    with pytest.raises(anthropic.BadRequestError, match=sentence):
        await sdk.messages.create(model="tiny", max_tokens=64, messages=turns)
