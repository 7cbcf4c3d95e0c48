"""The Responses API, asked by OpenAI's own Python client and checked against its types."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter
from tests.helpers.keeping_server import KeepingServer
from tests.helpers.lazy import lazy

from fwk.errors import RequestFailed
from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.parser import ParserContext
from fwk_kit.testing.fake_frontend import FakeFrontend
from fwk_parsers.json.parser import JsonParser
from fwk_parsers.think.parser import ThinkParser
from fwk_server._common.chat.items import messages_of, read_items
from fwk_server._common.records import Records
from fwk_server._common.store import ObjectStore, UnknownObject
from fwk_server.openai_responses import ResponsesOptions
from fwk_server.openai_responses.dialect import ResponsesDialect

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


async def test_what_a_dead_server_had_in_the_background_is_made_by_the_next(frontend, tmp_path):
    options = ResponsesOptions(files_dir=str(tmp_path))
    go = asyncio.Event()
    generate = frontend.generate

    async def waits(item):
        if frontend.items:
            await go.wait()
        async for deltas in generate(item):
            yield deltas

    frontend.generate = waits
    first = KeepingServer(ResponsesDialect, frontend, options)
    client = await first.start()
    at = "/v1/responses"
    before = (await client.post(at, json={"input": "Hi"})).json()
    talk = (await client.post("/v1/conversations", json={})).json()
    later = {"input": "And?", "background": True, "previous_response_id": before["id"]}
    asked = (await client.post(at, json=later)).json()
    lost = (await client.post(at, json=later)).json()
    assert (await client.get(f"{at}/{asked['id']}")).json()["status"] == "in_progress"
    await first.die()
    go.set()
    second = KeepingServer(ResponsesDialect, frontend, options)
    client = await second.start()
    async with asyncio.timeout(10):
        while (done := (await client.get(f"{at}/{asked['id']}")).json()).get("status") != "completed":
            await asyncio.sleep(0.01)
    assert done["output"][0]["content"][0]["text"] == TEXT
    assert done | {name: asked[name] for name in ("status", "completed_at", "output", "usage")} == asked
    assert (await client.get(f"{at}/{lost['id']}")).json()["status"] == "completed"
    assert (await client.get(f"/v1/conversations/{talk['id']}")).json() == talk
    assert (await client.delete(f"{at}/{lost['id']}")).json()["deleted"]
    await second.lifecycles.end()
    third = KeepingServer(ResponsesDialect, frontend, options)
    client = await third.start()
    assert (await client.get(f"{at}/{asked['id']}")).json() == done
    assert (await client.get(f"{at}/{lost['id']}")).status_code == 404
    await third.lifecycles.end()


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


async def test_what_is_refused(http, frontend):
    for fields, said, param in (
        ({"model": "other"}, "not served", "model"),
        ({"input": []}, "must not be empty", "input"),
        ({"input": None}, "input is missing", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "no item 'x' is stored here", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "images are sent in image_url", "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:;base64,eA"}]}]},
            "reads text only",
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "ghost_snapshot"}]}, "'ghost_snapshot' are not supported", "input"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "not one that this server made", "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "calls a tool", "input"),
        ({"tools": [{"name": "add"}]}, "None are run by no one here", "tools"),
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools", "tool_choice"),
        ({"conversation": "conv_1"}, "no conversation 'conv_1'", "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "both say what was before", "conversation"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 1}]}, "compact", "context_management"),
        ({"top_logprobs": -1}, "top_logprobs", "top_logprobs"),
        ({"include": ["x"]}, "include", "include[0]"),
        ({"store": False, "background": True}, "background needs store", "background"),
        ({"text": {"format": {"type": "grammar"}}}, "json_schema, not 'grammar'", "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "JSON schema", "text.format.schema"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort must be", "reasoning.effort"),
        ({"stop": ["x"]}, "stop is a field of /v1/chat/completions", "stop"),
        ({"prompt": {"id": "x"}}, "prompts are not kept", "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"metadata": {str(i): "" for i in range(17)}}, "at most 16", "metadata"),
    ):
        reply = await http.post("/v1/responses", json={"input": "Hi", **fields})
        assert reply.status_code in (400, 404), fields
        error = reply.json()["error"]
        assert said in error["message"], fields
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
    store = ObjectStore(8_192, Records(None, "test", FakeFrontend()), "")
    get = lambda name: store.get(("", name), "response", "response_id")  # noqa: E731
    for i in range(100):
        assert store.put(("", str(i)), {"response": "x" * 1_000}, [f"part {i}"])
        get(str(max(0, i - 1)))
        assert store.num_bytes <= 8_192
    with pytest.raises(UnknownObject):
        get("1")
    assert store.holding(("", "part 99")) == {"response": "x" * 1_000}
    assert store.holding(("", "part 1")) is store.holding(("other", "part 99")) is None
    assert not store.put(("", "99"), {"response": "x" * 10_000}), "too large for all of it"
    with pytest.raises(UnknownObject):
        store.get(("", "99"), "conversation", "conversation")
    for i in range(90, 100):
        store.delete(("", str(i)))
    assert store.num_bytes == 0
    assert store.holding(("", "part 99")) is None


async def test_what_an_agent_sends_besides(http, frontend, parsers, caplog):
    """Codex's fields, and tools that run in OpenAI's service: they are not offered to the model, and that is said."""
    others = [
        {"type": "namespace", "name": "n", "description": "", "tools": [TOOL]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": ""}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ]
    fields = {
        "client_metadata": {"session_id": "x"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "reasoning": {"summary": "auto", "context": "x"},
        "text": {"verbosity": "low", "tone": "x"},
        "truncation": "auto",
        "stream_options": {"include_obfuscation": False},
        "context_management": [{"type": "compaction", "compact_threshold": 200_000}],
        "a_field_of_later": 1,
        "temprature": 1,
    }
    for _ in range(2):
        found = await events_of(http, tools=[others[0], TOOL, *others[1:]], **fields)
    response = found[-1]["response"]
    responses.Response.model_validate(response, strict=True)
    assert [tool["type"] for tool in response["tools"]] == ["function"]
    assert b"apply_patch" not in prompt_of(frontend.items[0])
    lines = [record.getMessage() for record in caplog.records if "offered" in record.getMessage()]
    assert len(lines) == len(others), "each once"
    assert [line for line in caplog.messages if "temprature" in line] == [
        "the field 'temprature' of a request is unknown and ignored; did its client mean temperature?"
    ]
    only_others = await http.post("/v1/responses", json={"input": "Hi", "tools": others, "tool_choice": "auto"})
    assert only_others.status_code == 200
    assert only_others.json()["tools"] == []


async def test_strict_requests_refuse_what_is_ignored(app_of, frontend):
    dialect = ResponsesDialect(DialectContext(frontend, ResponsesOptions(strict_requests=True)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of(dialect)), base_url="http://test") as http:
        for fields, said in (
            ({"temprature": 1}, "'temprature' is not a field of /v1/responses"),
            ({"text": {"tone": "x"}}, "text.tone is not supported"),
            ({"reasoning": {"context": "x"}}, "reasoning.context is not supported"),
            ({"tools": [{"type": "web_search"}]}, "run by no one here"),
            ({"model": None}, "model is missing"),
        ):
            reply = await http.post("/v1/responses", json={"input": "Hi", "model": "tiny", **fields})
            assert reply.status_code == 400, fields
            assert said in reply.text
        fine = {"input": "Hi", "model": "tiny", "client_metadata": {}}
        assert (await http.post("/v1/responses", json=fine)).status_code == 200


def test_every_field_of_the_published_response():
    """Those that OpenAI's schema or Open Responses' requires, at their defaults where nothing was asked."""
    required = {name for name, field in responses.Response.model_fields.items() if field.is_required()}
    required |= {"presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "top_p", "usage", "store"}
    required |= {"completed_at", "incomplete_details", "max_output_tokens", "max_tool_calls", "previous_response_id"}
    required |= {"background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key", "instructions"}
    required |= {"error", "truncation", "text", "reasoning", "conversation", "status"}
    assert required <= asyncio.run(_a_response()).keys()


async def _a_response() -> dict[str, Any]:
    app = FastAPI()
    ResponsesDialect(DialectContext(FakeFrontend())).routes(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        return (await http.post("/v1/responses", json={"input": "Hi"})).json()


async def test_items_of_other_tools_and_of_earlier_responses(sdk, http, frontend):
    """Calls of tools that are no functions, calls that a service answered, and items named by their ids."""
    first = await sdk.responses.create(input="one")
    turns = [
        {"type": "item_reference", "id": first.output[0].id},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "applied"}]},
        {"type": "local_shell_call", "id": "l1", "call_id": "c2", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "id": "l1", "call_id": "c2", "output": "a.txt"},
        {"role": "user", "content": "two"},
    ]
    second = await sdk.responses.create(input=turns)
    prompt = prompt_of(frontend.items[1])
    for word in (TEXT.encode(), b"applied", b"a.txt", b"two"):
        assert word in prompt, word
    told = messages_of(None, read_items(turns[1:], lambda name: {}))
    calls = [call["function"] for message in told for call in message.get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("apply_patch", {"input": "*** Begin"}),
        ("local_shell", {"action": {"command": ["ls"]}}),
    ]
    listed = (await http.get(f"/v1/responses/{second.id}/input_items")).json()
    assert [item["type"] for item in listed["data"]][::-1][1:4] == [turn["type"] for turn in turns[1:4]]
    with pytest.raises(openai.NotFoundError):
        await sdk.with_options(api_key="sk-other").responses.create(input=turns[:1])


async def test_counting_and_compacting(sdk, frontend, fake):
    counted = await sdk.responses.input_tokens.count(model="tiny", input="Hi", instructions="Be kind.")
    await sdk.responses.create(model="tiny", input="Hi", instructions="Be kind.")
    assert counted.input_tokens == len(frontend.items[-1].prompt_token_ids)
    assert (await sdk.responses.input_tokens.count()).input_tokens == 0
    frontend.script = lambda item: [[delta] for delta in fake.deltas_of(item, "In short: Tuesday.")]
    turns = [{"role": "user", "content": "Long ago"}, {"role": "assistant", "content": "Yes"}]
    turns.append({"role": "user", "content": "Now"})
    made = await sdk.responses.compact(model="tiny", input=turns)
    assert [item.type for item in made.output] == ["message", "compaction"]
    assert made.object == "response.compaction"
    assert made.usage.output_tokens == len("In short: Tuesday.")
    assert b"Long ago" in prompt_of(frontend.items[-1])
    output = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
    await sdk.responses.create(input=[*output, {"role": "user", "content": "And?"}])
    prompt = prompt_of(frontend.items[-1])
    assert b"In short: Tuesday." in prompt
    assert b"Long ago" not in prompt
    with pytest.raises(openai.BadRequestError, match="model"):
        await sdk.post("/responses/compact", body={"input": "Hi"}, cast_to=object)


async def test_conversations(sdk, http, frontend):
    made = await sdk.conversations.create(items=[{"role": "user", "content": "zero"}], metadata={"a": "b"})
    openai.types.conversations.Conversation.model_validate(made.model_dump(), strict=True)
    first = await sdk.responses.create(input="one", conversation=made.id)
    assert first.conversation.id == made.id
    await sdk.responses.create(input="two", conversation={"id": made.id}, store=False, stream=False)
    prompt = prompt_of(frontend.items[1])
    assert prompt.index(b"zero") < prompt.index(b"one") < prompt.index(TEXT.encode()) < prompt.index(b"two")
    await events_of(http, input="three", conversation=made.id)
    items = [item async for item in sdk.conversations.items.list(made.id, order="asc", limit=2)]
    assert [item.content[0].text for item in items] == ["zero", "one", TEXT, "two", TEXT, "three", TEXT]
    added = await sdk.conversations.items.create(made.id, items=[{"role": "user", "content": "four"}])
    one = await sdk.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert one.content[0].text == "four"
    await sdk.conversations.items.delete(one.id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.conversations.items.retrieve(one.id, conversation_id=made.id)
    assert (await sdk.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    assert (await sdk.conversations.retrieve(made.id)).metadata == {"c": "d"}
    for wrong in (
        sdk.responses.retrieve(made.id),
        sdk.responses.delete(made.id),
        sdk.conversations.retrieve(first.id),
        sdk.with_options(api_key="sk-other").conversations.retrieve(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await wrong
    assert (await sdk.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.create(input="five", conversation=made.id)


async def test_a_conversation_larger_than_the_store_is_refused_and_stays(app_of, frontend):
    dialect = ResponsesDialect(DialectContext(frontend, ResponsesOptions(responses_store_bytes=6_000)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of(dialect)), base_url="http://test") as http:
        made = (await http.post("/v1/conversations", json={})).json()
        path = f"/v1/conversations/{made['id']}/items"
        items = [{"role": "user", "content": "x" * 1_000}]
        replies = [(await http.post(path, json={"items": items})).status_code for _ in range(6)]
        assert sorted(set(replies)) == [200, 400]
        kept = (await http.get(path)).json()["data"]
        assert len(kept) == replies.count(200)
        reply = await http.post("/v1/responses", json={"input": "y" * 200, "conversation": made["id"]})
        assert reply.status_code == 200, "only what is kept is bounded"


async def test_a_method_that_is_not_there_names_those_that_are(http):
    reply = await http.put("/v1/responses/resp_1")
    assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET")
