"""Anthropic's dialect, asked by its own Python client."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import FastAPI
from tests.helpers.lazy import lazy

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.parser import ParserContext
from fwk_parsers.json.parser import JsonParser
from fwk_parsers.think.parser import ThinkParser
from fwk_server.anthropic.dialect import AnthropicDialect
from fwk_server.anthropic.request import prompt_fields

anthropic = lazy("anthropic")

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
TEXT = "Gr\u00fc\u00dfe 0 \U0001f642!"
CALLED = [
    *HI,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
]
CLEAR = {"type": "clear_tool_uses_20250919"}
THOUGHT = {"type": "clear_thinking_20251015"}
PAST = ("BadRequestError", "nothing is cleared")


def turns_kept(value):
    return {"type": "thinking_turns", "value": value}


def managed(*edits):
    return {"context_management": {"edits": [*edits]}}


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


async def test_what_is_refused(sdk):
    for fields, error, said in (
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
        ({"extra_body": managed({"type": "shorten"})}, "BadRequestError", "not 'shorten'"),
        ({"extra_body": managed(CLEAR | {"trigger": {"type": "input_tokens", "value": 1}})}, *PAST),
        ({"extra_body": managed(CLEAR | {"trigger": {"type": "tool_uses", "value": 0}}), "messages": CALLED}, *PAST),
        (
            {"extra_body": managed(THOUGHT | {"keep": {"type": "thinking_turns", "value": 0}}), "messages": CALLED},
            *PAST,
        ),
        (
            {"extra_body": managed(CLEAR | {"trigger": {"type": "words", "value": 1}})},
            "BadRequestError",
            "trigger.type",
        ),
    ):
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


async def test_other_documents_are_refused(sdk):
    for block, sentence in (
        ({"source": {"type": "base64", "media_type": "application/pdf", "data": ""}}, "a document of type 'base64'"),
        ({"source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}, "nothing is cited here"),
        ({"source": {"type": "text", "data": "x"}, "citations": [1]}, "must be an object"),
    ):
        turns = [{"role": "user", "content": [{"type": "document", **block}]}]
        with pytest.raises(anthropic.BadRequestError, match=sentence):
            await sdk.messages.create(model="tiny", max_tokens=64, messages=turns)


async def test_every_member_of_the_published_message(sdk, frontend):
    """Those that Anthropic's API description requires; its Python types leave most of them optional."""
    usage = {"input_tokens", "output_tokens", "cache_creation", "cache_creation_input_tokens"}
    usage |= {"cache_read_input_tokens", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier"}
    whole = await sdk.messages.create(model="tiny", max_tokens=64, messages=HI)
    assert usage == whole.usage.model_dump(exclude_unset=True).keys()
    told = whole.content[0].model_dump(exclude_unset=True)
    assert told.keys() == {"type", "text", "citations"}
    assert told["citations"] == [], (
        "Anthropic's schema has it; the AI SDK's provider takes an array or nothing, no null"
    )
    members = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "stop_details", "container"}
    assert whole.model_dump(exclude_unset=True).keys() == members | {"usage"}
    stream = await sdk.messages.create(model="tiny", max_tokens=64, messages=HI, stream=True)
    events = {event.type: event.model_dump(exclude_unset=True) async for event in stream}
    assert events["message_start"]["message"].keys() == members | {"usage"}
    assert events["content_block_start"]["content_block"].keys() == {"type", "text", "citations"}
    assert events["message_delta"]["delta"].keys() == {"stop_reason", "stop_sequence", "stop_details", "container"}
    counted = usage - {"cache_creation", "inference_geo", "service_tier"}
    assert events["message_delta"]["usage"].keys() == counted


async def test_edits_below_their_threshold_do_nothing(sdk):
    edits = [
        THOUGHT | {"keep": "all"},
        THOUGHT | {"keep": turns_kept(1)},
        THOUGHT,
        CLEAR,
        CLEAR | {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 0}},
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}},
    ]
    asked = {"model": "tiny", "messages": CALLED, "betas": ["context-management-2025-06-27", "x"]}
    asked["context_management"] = {"edits": edits}
    message = await sdk.beta.messages.create(**asked, max_tokens=64)
    assert message.context_management.applied_edits == []
    async with sdk.beta.messages.stream(**asked, max_tokens=64) as stream:
        assert (await stream.get_final_message()).context_management.applied_edits == []
    counted = await sdk.beta.messages.count_tokens(**asked)
    assert counted.context_management.original_input_tokens == counted.input_tokens


def test_system_messages_amid_the_turns_stay_where_they_are():
    blocks = [{"type": "text", "text": "Two", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "."}]
    turns = [{"role": "system", "content": "One."}, *HI, {"role": "system", "content": blocks}]
    assert prompt_fields({"system": "Be brief.", "messages": turns})["messages"] == [
        {"role": "system", "content": "Be brief.\n\nOne."},
        *HI,
        {"role": "system", "content": "Two."},
    ]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    with pytest.raises(InvalidRequest, match="type 'image' is not supported here"):
        prompt_fields({"messages": [*HI, {"role": "system", "content": [image]}]})


async def test_images_of_tool_results_follow_them(sdk, frontend):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    told = prompt_fields(
        {
            "messages": [
                *CALLED[:2],
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "a plot"}, image],
                        },
                        {"type": "tool_result", "tool_use_id": "t2", "content": [image]},
                        {"type": "text", "text": "What is it?"},
                    ],
                },
            ]
        }
    )["messages"][2:]
    assert [(message["role"], message["content"]) for message in told[:2]] == [
        ("tool", "a plot"),
        ("tool", "The result is the image below."),
    ]
    [asked] = told[2:]
    assert [part["type"] for part in asked["content"]] == ["image_url", "image_url", "text"]
    turns = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image]}]}]
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        await sdk.messages.create(model="tiny", max_tokens=9, messages=[*CALLED[:2], *turns])


def requests_of(*names, **fields):
    return [
        {"custom_id": name, "params": {"model": "tiny", "max_tokens": 64, "messages": HI} | fields} for name in names
    ]


async def test_message_batches(sdk, frontend):
    batches = sdk.messages.batches
    made = await batches.create(requests=[*requests_of("a", "b"), *requests_of("wrong", max_tokens=0)])
    assert made.processing_status == "in_progress"
    assert made.request_counts.processing == 3
    async with asyncio.timeout(10):
        while (batch := await batches.retrieve(made.id)).processing_status != "ended":
            await asyncio.sleep(0.01)
    anthropic.types.messages.MessageBatch.model_validate(batch.model_dump(), strict=True)
    assert batch.request_counts.model_dump() == dict(succeeded=2, errored=1, processing=0, canceled=0, expired=0)
    found = {line.custom_id: line.result async for line in await batches.results(made.id)}
    assert {name: result.type for name, result in found.items()} == dict(a="succeeded", b="succeeded", wrong="errored")
    assert found["a"].message.content[0].text == TEXT
    assert found["a"].message.usage.service_tier == "batch"
    assert "max_tokens" in found["wrong"].error.error.message
    other = await batches.create(requests=requests_of("c"))
    third = await batches.create(requests=requests_of("d"))
    assert [batch.id async for batch in batches.list(limit=1)] == [third.id, other.id, made.id], "the newest first"
    page = await batches.list(limit=1, before_id=made.id)
    assert ([batch.id for batch in page.data], page.has_more) == ([other.id], True)
    for wrong in (
        batches.retrieve("msgbatch_none"),
        sdk.with_options(api_key="sk-other").messages.batches.results(made.id),
    ):
        with pytest.raises(anthropic.NotFoundError, match="there is no message batch"):
            await wrong
    assert (await batches.delete(made.id)).id == made.id
    with pytest.raises(anthropic.NotFoundError):
        await batches.retrieve(made.id)


async def test_a_message_batch_that_is_ended(sdk, frontend):
    frontend.script = lambda item: [60.0]
    batches = sdk.messages.batches
    made = await batches.create(requests=requests_of("a", "b"))
    with pytest.raises(anthropic.BadRequestError, match="when it has ended"):
        await batches.delete(made.id)
    with pytest.raises(anthropic.AnthropicError, match="results_url"):
        await batches.results(made.id)
    ended = await batches.cancel(made.id)
    assert (ended.processing_status, ended.request_counts.canceled) == ("ended", 2)
    assert ended.cancel_initiated_at is not None
    assert {line.custom_id: line.result.type async for line in await batches.results(made.id)} == {
        "a": "canceled",
        "b": "canceled",
    }


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "at least 1"),
        (requests_of("a", "a"), "is there twice"),
        (requests_of("a b"), "letters, digits"),
        ([{"custom_id": "a"}], "params must be an object"),
        (requests_of("a", stream=True), "not streamed"),
    ],
)
async def test_message_batches_that_are_refused(sdk, requests, said):
    with pytest.raises(anthropic.BadRequestError, match=said):
        await sdk.messages.batches.create(requests=requests)
