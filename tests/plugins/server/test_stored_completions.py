"""Chat completions that are kept, asked for by OpenAI's own Python client."""

from __future__ import annotations

import httpx
import pytest
from tests.helpers.lazy import lazy

from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.parser import ParserContext
from fwk_parsers.json.parser import JsonParser
from fwk_server.openai import OpenAIOptions
from fwk_server.openai.dialect import OpenAIDialect

openai = lazy("openai")

HI = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


async def test_what_is_stored(sdk):
    completions = sdk.chat.completions
    made = await completions.create(model="tiny", messages=HI, store=True, metadata={"a": "b"}, n=2)
    await completions.create(model="tiny", messages=HI, store=False)
    async for chunk in await completions.create(
        model="tiny", messages=HI, store=True, stream=True, metadata={"c": "d"}
    ):
        streamed = chunk.id
    kept = await completions.retrieve(made.id)
    assert kept.choices == made.choices
    assert kept.usage == made.usage
    whole = await completions.retrieve(streamed)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message == made.choices[0].message
    assert [one.id async for one in completions.list(limit=1)] == [made.id, streamed]
    assert [one.id async for one in completions.list(order="desc")] == [streamed, made.id]
    assert [one.id async for one in completions.list(metadata={"c": "d"})] == [streamed]
    assert [one.id async for one in completions.list(model="other")] == []
    messages = [message async for message in completions.messages.list(made.id)]
    assert [(message.role, message.content) for message in messages] == [("system", "Be kind."), ("user", "Hi")]
    assert (await completions.update(made.id, metadata={"e": "f"})).metadata == {"e": "f"}
    assert (await completions.retrieve(made.id)).metadata == {"e": "f"}
    for wrong in (
        completions.retrieve("chatcmpl-none"),
        completions.update("chatcmpl-none", metadata={}),
        completions.delete("chatcmpl-none"),
        sdk.with_options(api_key="sk-other").chat.completions.retrieve(made.id),
    ):
        with pytest.raises(openai.NotFoundError, match="no completion"):
            await wrong
    assert (await completions.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await completions.retrieve(made.id)


async def test_metadata_is_checked_where_it_is_kept(sdk, frontend):
    for wrong in ({"a": 1}, {str(i): "" for i in range(17)}, {"a" * 65: ""}, {"a": "b" * 513}):
        with pytest.raises(openai.BadRequestError, match="metadata"):
            await sdk.chat.completions.create(model="tiny", messages=HI, store=True, metadata=wrong)
        await sdk.chat.completions.create(model="tiny", messages=HI, metadata=wrong)
    assert len(frontend.items) == 4, "refused before anything was computed"


async def test_calls_of_a_stream_are_stored_whole(sdk, frontend, fake):
    frontend.tool_parser = lambda tools, tail="", is_forced=False: JsonParser(ParserContext(tools, tail))
    frontend.script = lambda item: [[delta] for delta in fake.deltas_of(item, '{"name": "f", "arguments": {"a": 1}}')]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async for chunk in await sdk.chat.completions.create(
        model="tiny", messages=HI, tools=[tool], stream=True, store=True
    ):
        name = chunk.id
    [choice] = (await sdk.chat.completions.retrieve(name)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'


async def test_a_store_of_nothing(app_of, frontend):
    dialect = OpenAIDialect(DialectContext(frontend, OpenAIOptions(completions_store_bytes=0)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of(dialect)), base_url="http://test") as http:
        body = {"messages": HI, "store": True}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await http.get("/v1/chat/completions")).json()["data"] == []


async def test_a_change_that_does_not_fit_changes_nothing(app_of, frontend):
    dialect = OpenAIDialect(DialectContext(frontend, OpenAIOptions(completions_store_bytes=3_000)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app_of(dialect)), base_url="http://test") as http:
        body = {"messages": HI, "store": True, "metadata": {"a": "b"}}
        at = f"/v1/chat/completions/{(await http.post('/v1/chat/completions', json=body)).json()['id']}"
        kept = (await http.get(at)).json()
        refused = await http.post(at, json={"metadata": {str(i): "x" * 512 for i in range(8)}})
        assert (refused.status_code, "--completions-store-bytes" in refused.text) == (400, True)
        assert (await http.get(at)).json() == kept


async def test_a_misspelt_field_is_named_once_in_the_log(sdk, caplog):
    for _ in range(2):
        extra = {"temprature": 1, "a_field_of_later": 1}
        await sdk.chat.completions.create(model="tiny", messages=HI, extra_body=extra)
    assert [line for line in caplog.messages if "unknown" in line] == [
        "the field 'temprature' of a request is unknown and ignored; did its client mean temperature?"
    ]


async def test_moderations_say_what_is_missing(whole_app, dialect):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(whole_app(dialect)), base_url="http://test") as http:
        reply = await http.post("/v1/moderations", json={"input": "x"})
    assert reply.status_code == 404
    assert "serve a classifier" in reply.json()["error"]["message"]
