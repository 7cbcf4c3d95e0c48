"""The Responses API, asked by OpenAI's own Python client and checked against its types."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from tests.helpers.lazy import lazy

from fwk.errors import RequestFailed
from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.parser import ParserContext
from fwk_parsers.json.parser import JsonParser
from fwk_parsers.think.parser import ThinkParser
from fwk_server.openai_responses import ResponsesOptions
from fwk_server.openai_responses.dialect import ResponsesDialect
from fwk_server.openai_responses.store import ResponseStore, UnknownResponse

openai = lazy("openai")
responses = lazy("openai.types.responses")


@cache
def event_type() -> TypeAdapter[Any]:
    return TypeAdapter(responses.ResponseStreamEvent)


TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TEXT = "Gr\u00fc\u00dfe 0 \U0001f642!"
THOUGHT = '<think>hm</think>{"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": {}}'


@pytest.fixture
def dialect(frontend) -> ResponsesDialect:
    return ResponsesDialect(DialectContext(frontend, ResponsesOptions(max_background_responses=1)))


@pytest.fixture
async def http(base_url):
    async with httpx.AsyncClient(base_url=base_url, headers={"authorization": "Bearer sk-mine"}) as client:
        yield client


@pytest.fixture
def parsers(frontend, fake):
    frontend.tool_parser = lambda tools, tail="", is_forced=False: JsonParser(ParserContext(tools, tail))
    frontend.reasoning_parser = lambda tail="": ThinkParser(ParserContext((), tail))
    frontend.script = lambda item: [[delta] for delta in fake.deltas_of(item, THOUGHT)]


def prompt_of(item) -> bytes:
    return bytes(token for token in item.prompt_token_ids if token < 256)


def without_ids(value: Any) -> Any:
    """An object with nothing in it that differs from one response to the next."""
    if isinstance(value, list):
        return [without_ids(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {name: without_ids(part) for name, part in value.items() if not name.endswith(("id", "_at"))}


async def events_of(http, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the client's types, numbered and named as it should be."""
    reply = await http.post("/v1/responses", json={"input": "Hi", "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        event_type().validate_python(found[-1], strict=True)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_scores_are_those_of_the_answer(http, frontend, fake):
    """Thinking has none, and what is held back is scored when it is told."""
    frontend.reasoning_parser = lambda tail="": ThinkParser(ParserContext((), tail))
    frontend.script = lambda item: [[delta] for delta in fake.deltas_of(item, "<think>hm</think>Yes.")]
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = await events_of(http, **asked)
    whole = (await http.post("/v1/responses", json={"input": "Hi", **asked})).json()
    for response in (found[-1]["response"], whole):
        [part] = response["output"][-1]["content"]
        assert "".join(score["token"] for score in part["logprobs"]) == "Yes."
        assert all(len(score["top_logprobs"]) == 2 for score in part["logprobs"])
    streamed = [
        score for event in found if event["type"] == "response.output_text.delta" for score in event["logprobs"]
    ]
    assert streamed == part["logprobs"]


async def test_a_response_whole_and_streamed(sdk, http, frontend):
    whole = await sdk.responses.create(input="Hi", instructions="Be kind.", max_output_tokens=64, metadata={"a": "b"})
    responses.Response.model_validate(whole.model_dump(by_alias=True), strict=True)
    assert (whole.output_text, whole.status, whole.metadata, whole.store) == (TEXT, "completed", {"a": "b"}, True)
    assert whole.usage.output_tokens == len(TEXT.encode())
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert frontend.items[0].sampling.max_tokens == 64
    assert b"Be kind." in prompt_of(frontend.items[0])
    async with sdk.responses.stream(input="Hi", model="tiny") as stream:
        seen = [event.type async for event in stream]
        last = await stream.get_final_response()
    assert (last.output_text, seen[0], seen[-1]) == (TEXT, "response.created", "response.completed")
    events = await events_of(http)
    raw = (await http.post("/v1/responses", json={"input": "Hi"})).json()
    responses.Response.model_validate(raw, strict=True)
    assert without_ids(events[-1]["response"]) == without_ids(raw)


async def test_reasoning_and_calls_whole_and_streamed(sdk, http, frontend, parsers):
    whole = await sdk.responses.create(model="tiny", input="Hi", tools=[TOOL])
    events = await events_of(http, tools=[TOOL])
    async with sdk.responses.stream(model="tiny", input="Hi", tools=[TOOL]) as stream:
        async for _ in stream:
            pass
        helped = await stream.get_final_response()
    for output in (
        whole.output,
        helped.output,
        responses.Response.model_validate(events[-1]["response"], strict=True).output,
    ):
        assert [item.type for item in output] == ["reasoning", "function_call", "function_call"]
        assert output[0].content[0].text == "hm"
        assert [json.loads(item.arguments) for item in output[1:]] == [{"a": 1}, {}]
    kinds = {event["type"] for event in events}
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert added == [0, 1, 2]
    assert done == events[-1]["response"]["output"]
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "41"} for item in whole.output[1:]]
    turns = [{"role": "user", "content": "Hi"}, *[item.model_dump() for item in whole.output], *results]
    await sdk.responses.create(model="tiny", input=turns, tools=[TOOL], store=False)
    alone = prompt_of(frontend.items[-1])
    assert b"41" in alone
    await sdk.responses.create(model="tiny", input=results, tools=[TOOL], previous_response_id=whole.id)
    assert prompt_of(frontend.items[-1]) == alone, "the same conversation, sent and stored"


async def test_what_is_stored(sdk, http):
    first = await sdk.responses.create(input=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    assert (await sdk.responses.retrieve(first.id)).model_dump() == first.model_dump()
    raw = (await http.get(f"/v1/responses/{first.id}/input_items")).json()
    responses.ResponseItemList.model_validate(raw, strict=True)
    assert [item["content"][0]["text"] for item in raw["data"]] == ["two", "one"]
    page = (await http.get(f"/v1/responses/{first.id}/input_items?limit=1&order=asc")).json()
    assert page["has_more"] is True
    listed = [item.content[0].text async for item in sdk.responses.input_items.list(first.id, limit=1, order="asc")]
    assert listed == ["one", "two"]
    unsaved = await sdk.responses.create(input="Hi", store=False)
    assert unsaved.store is False
    for wrong in (unsaved.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="is stored here"):
            await sdk.responses.create(input="Hi", previous_response_id=wrong)
    with pytest.raises(openai.NotFoundError):
        await sdk.with_options(api_key="sk-other").responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="only responses in the background"):
        await sdk.responses.cancel(first.id)
    await sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(first.id)


async def test_in_the_background(sdk, http, frontend, fake):
    go = asyncio.Event()
    generate = frontend.generate

    async def waits(item):
        await go.wait()
        async for deltas in generate(item):
            yield deltas

    frontend.generate = waits
    asked = await sdk.responses.create(input="Hi", background=True)
    assert asked.status == "queued"
    with pytest.raises(openai.RateLimitError, match="in the background already"):
        await sdk.responses.create(input="Hi", background=True)
    raw = (await http.get(f"/v1/responses/{asked.id}")).json()
    responses.Response.model_validate(raw, strict=True)
    assert raw["status"] == "in_progress"
    ended = await sdk.responses.cancel(asked.id)
    assert ended.status == "cancelled"
    assert (await sdk.responses.retrieve(asked.id)).status == "cancelled"
    other = await sdk.responses.create(input="Hi", background=True)
    go.set()
    async with asyncio.timeout(10):
        while (done := await sdk.responses.retrieve(other.id)).status == "in_progress":
            await asyncio.sleep(0.01)
    assert (done.status, done.output_text) == ("completed", TEXT)
    go.clear()
    third = await sdk.responses.create(input="Hi", background=True)
    await sdk.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(third.id)


async def test_a_stream_in_the_background_goes_on_without_its_client(sdk, frontend):
    """Whoever lost it gets the rest, and all of it later: the same events."""
    go = asyncio.Event()
    generate = frontend.generate

    async def waits(item):
        source = generate(item)
        yield await anext(source)
        await go.wait()
        async for deltas in source:
            yield deltas

    frontend.generate = waits
    seen = []
    stream = await sdk.responses.create(input="Hi", background=True, stream=True)
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    response_id, last = seen[0].response.id, seen[-1].sequence_number
    assert (await sdk.responses.retrieve(response_id)).status == "in_progress"
    follower = await sdk.responses.retrieve(response_id, stream=True, starting_after=last)
    go.set()
    rest = [event async for event in follower]
    assert [event.sequence_number for event in [*seen, *rest]] == list(range(len(seen) + len(rest)))
    assert rest[-1].type == "response.completed"
    text = "".join(event.delta for event in [*seen, *rest] if event.type == "response.output_text.delta")
    assert text == TEXT
    again = await sdk.responses.retrieve(response_id, stream=True)
    assert [event async for event in again] == [*seen, *rest]
    nothing = await sdk.responses.retrieve(response_id, stream=True, starting_after=len(seen) + len(rest))
    assert [event async for event in nothing] == []
    with pytest.raises(openai.BadRequestError, match="starting_after must be the number"):
        await sdk.responses.retrieve(response_id, stream=True, extra_query={"starting_after": "x"})
    plain = await sdk.responses.create(input="Hi")
    with pytest.raises(openai.BadRequestError, match="the events of this response are not kept"):
        await sdk.responses.retrieve(plain.id, stream=True)


async def test_who_follows_a_response_hears_of_its_end(sdk, frontend):
    """When it is cancelled, deleted, or fails."""
    generate = frontend.generate

    async def hangs(item):
        async for deltas in generate(item):
            yield deltas
            await asyncio.Event().wait()

    async def breaks(item):
        async for deltas in generate(item):
            yield deltas
            raise RequestFailed("the engine broke")

    frontend.generate = hangs
    for end in (sdk.responses.cancel, sdk.responses.delete):
        stream = await sdk.responses.create(input="Hi", background=True, stream=True)
        first = await anext(aiter(stream))
        await end(first.response.id)
        async with asyncio.timeout(10):
            assert "response.completed" not in [event.type async for event in stream]
    frontend.generate = breaks
    stream = await sdk.responses.create(input="Hi", background=True, stream=True)
    assert [event.type async for event in stream][-1] == "response.failed"


async def test_the_length_limit_and_a_failure(sdk, http, frontend, fake):
    frontend.script = lambda item: [[delta] for delta in fake.deltas_of(item, TEXT, finish="length")]
    events = await events_of(http)
    last = events[-1]
    assert (last["type"], last["response"]["incomplete_details"]) == (
        "response.incomplete",
        {"reason": "max_output_tokens"},
    )
    assert last["response"]["output"][-1]["status"] == "incomplete"
    generate = frontend.generate

    async def breaks(item):
        source = generate(item)
        yield await anext(source)
        await source.aclose()
        raise RequestFailed("the engine broke")

    frontend.generate = breaks
    last = (await events_of(http))[-1]
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "the engine broke")
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(last["response"]["id"])


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"model": "other"}, "not served", "model"),
        ({"input": []}, "must not be empty", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text only", "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "calls a tool", "input"),
        ({"tools": [{"type": "web_search"}]}, "run by no one here", "tools"),
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
        ({"truncation": "auto"}, "nothing is left out", "truncation"),
        ({"conversation": "conv_1"}, "conversations are not kept", "conversation"),
        ({"top_logprobs": -1}, "top_logprobs", "top_logprobs"),
        ({"include": ["web_search_call.results"]}, "include", "include[0]"),
        ({"store": False, "background": True}, "background needs store", "background"),
        ({"text": {"format": {"type": "grammar"}}}, "json_schema, not 'grammar'", "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "JSON schema", "text.format.schema"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort must be", "reasoning.effort"),
        ({"temprature": 1}, "not a field of /v1/responses", "temprature"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"metadata": {str(i): "" for i in range(17)}}, "at most 16", "metadata"),
    ],
)
async def test_what_is_refused(http, frontend, fields, said, param):
    reply = await http.post("/v1/responses", json={"input": "Hi", **fields})
    assert reply.status_code in (400, 404)
    error = reply.json()["error"]
    assert said in error["message"]
    assert error["param"] == param
    assert not frontend.items


async def test_a_schema_reaches_the_engine(sdk, frontend):
    frontend.grammar_kinds = frozenset({"json_schema"})
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    whole = await sdk.responses.create(input="Hi", text={"format": wanted})
    grammar = frontend.items[0].sampling.grammar
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema)
    assert whole.text.format.name == "x"


def test_the_store_is_bounded():
    store = ResponseStore(5_120)
    for i in range(100):
        store.put(("", str(i)), {"response": "x" * 1_000})
        store.get(("", str(max(0, i - 1))))
        assert store.num_bytes <= 5_120
    with pytest.raises(UnknownResponse):
        store.get(("", "1"))
    store.put(("", "99"), {"response": "x" * 10_000})  # too large for all of it
    with pytest.raises(UnknownResponse):
        store.get(("", "99"))
    for i in (97, 98):
        store.delete(("", str(i)))
    assert store.num_bytes == 0


async def test_a_method_that_is_not_there_names_those_that_are(http):
    reply = await http.put("/v1/responses/resp_1")
    assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET")
