"""Tools of MCP servers in the Responses API: real servers by the protocol's own SDK, and OpenAI's client and types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from tests.helpers.http_app import listening
from tests.helpers.lazy import lazy

from fwk.errors import ConfigError, InvalidRequest
from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.parser import ParserContext
from fwk_parsers.json.parser import JsonParser
from fwk_server._common.chat.items import messages_of, read_items
from fwk_server.openai_responses import ResponsesOptions
from fwk_server.openai_responses.dialect import ResponsesDialect
from fwk_server.openai_responses.tool_servers import ToolServers

mcpserver = lazy("mcp.server.mcpserver")
responses = lazy("openai.types.responses")


@cache
def event_type() -> TypeAdapter[Any]:
    return TypeAdapter(responses.ResponseStreamEvent)


ADD = '{"name": "add", "arguments": {"a": 40, "b": 2}}'
NEVER = {"type": "mcp", "server_label": "sums", "require_approval": "never"}


class Sums:
    """The tools of the tests, and what became of their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tokens: list[str | None] = []
        self.hangs = asyncio.Event()
        self.cancelled = asyncio.Event()
        server = mcpserver.MCPServer("sums")

        @server.tool()
        async def add(a: int, b: int) -> str:
            """Adds two numbers."""
            self.calls.append((a, b))
            return str(a + b)

        @server.tool(annotations={"readOnlyHint": True})
        async def look() -> str:
            """Looks."""
            self.calls.append("look")
            return "seen"

        @server.tool()
        async def fail() -> str:
            """Fails."""
            raise ValueError("out of numbers")

        @server.tool()
        async def hang() -> str:
            """Waits."""
            self.hangs.set()
            try:
                await asyncio.sleep(600)
            finally:
                self.cancelled.set()
            return ""

        self.app = server.streamable_http_app()
        self.sse = server.sse_app()

    async def heard(self, scope: Any, receive: Any, send: Any) -> None:
        """The app; notes what each request says of itself."""
        if scope["type"] == "http":
            self.tokens.append(dict(scope["headers"]).get(b"authorization", b"").decode() or None)
        await (self.sse if scope.get("path", "").startswith(("/sse", "/messages")) else self.app)(scope, receive, send)


@pytest.fixture
async def sums() -> AsyncIterator[Sums]:
    found = Sums()
    async with listening(found.heard, interface="asgi3") as url:
        found.url = url
        yield found


@pytest.fixture
async def dialect(frontend, sums) -> ResponsesDialect:
    options = ResponsesOptions(tool_server=(f"sums={sums.url}",), tool_server_timeout=5.0)
    dialect = ResponsesDialect(DialectContext(frontend, options))
    await dialect._servers.connect()
    return dialect


@pytest.fixture
async def http(base_url):
    async with httpx.AsyncClient(base_url=base_url, timeout=60, headers={"authorization": "Bearer sk-mine"}) as client:
        yield client


@pytest.fixture
def says(frontend, fake):
    """Have the model say one text after another; its last one again and again."""

    def set_texts(*texts: str) -> None:
        left = list(texts)

        def script(item):
            text = left.pop(0) if len(left) > 1 else left[0]
            return [[delta] for delta in fake.deltas_of(item, text)]

        frontend.tool_parser = lambda tools, tail="", is_forced=False: JsonParser(ParserContext(tools, tail))
        frontend.script = script

    return set_texts


def prompt_of(item: Any) -> str:
    return bytes(token for token in item.prompt_token_ids if token < 256).decode()


def kinds(output: list[Any]) -> list[str]:
    return [item["type"] for item in output]


async def answered(http, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/responses", json={"input": "Hi", "tools": [NEVER], **fields})
    assert reply.status_code == 200, reply.text
    responses.Response.model_validate(reply.json(), strict=True)
    return reply.json()


async def refused(http, **fields: Any) -> str:
    reply = await http.post("/v1/responses", json={"input": "Hi", **fields})
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["message"]


async def events_of(http, **fields: Any) -> list[dict[str, Any]]:
    reply = await http.post("/v1/responses", json={"input": "Hi", "stream": True, "tools": [NEVER], **fields})
    assert reply.status_code == 200, reply.text
    found = [json.loads(block.split("\ndata: ")[1]) for block in reply.text.removesuffix("\n\n").split("\n\n")]
    for event in found:
        event_type().validate_python(event, strict=True)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_call_is_made_and_its_result_read(http, frontend, sums, says):
    says(ADD, "It is 42.")
    whole = await answered(http)
    assert kinds(whole["output"]) == ["mcp_list_tools", "mcp_call", "message"]
    listed, call, message = whole["output"]
    assert [tool["name"] for tool in listed["tools"]] == ["add", "look", "fail", "hang"]
    assert listed["tools"][0]["input_schema"]["required"] == ["a", "b"]
    assert (call["output"], call["error"], call["status"]) == ("42", None, "completed")
    assert message["content"][0]["text"] == "It is 42."
    assert sums.calls == [(40, 2)]
    first, second = frontend.items
    assert "Adds two numbers." in str(frontend.text.seen.tools)
    assert "42" in prompt_of(second)
    assert "40" in str(frontend.text.seen.messages)
    usage = whole["usage"]
    assert usage["input_tokens"] == len(first.prompt_token_ids) + len(second.prompt_token_ids)
    assert usage["output_tokens"] == len(ADD) + len("It is 42.")


async def test_the_servers_are_listed_without_their_addresses(http, sums):
    reply = await http.get("/v1/tool_servers")
    [server] = reply.json()["data"]
    assert (server["label"], [tool["name"] for tool in server["tools"]]) == ("sums", ["add", "look", "fail", "hang"])
    assert server["tools"][1]["annotations"]["readOnlyHint"]
    assert sums.url not in reply.text


@pytest.mark.sweep
async def test_the_events_tell_the_same_response(http, says):
    says(ADD, "It is 42.")
    events = await events_of(http)
    names = [event["type"] for event in events]
    order = [
        "response.created",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.output_text.delta",
        "response.completed",
    ]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.mcp_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"a": 40, "b": 2}


async def test_several_calls_and_rounds(http, frontend, sums, says):
    says(f'{ADD}\n{{"name": "look", "arguments": {{}}}}', ADD, "Done.")
    whole = await answered(http)
    assert kinds(whole["output"]) == ["mcp_list_tools", *["mcp_call"] * 3, "message"]
    assert [item["output"] for item in whole["output"][1:4]] == ["42", "seen", "42"]
    assert len(frontend.items) == 3
    assert sorted(map(str, sums.calls)) == ["(40, 2)", "(40, 2)", "look"]


@pytest.mark.sweep
async def test_the_next_turn_reads_the_calls_and_lists_no_tools_again(http, frontend, says):
    says(ADD, "It is 42.", "Yes.")
    first = await answered(http)
    second = await answered(http, input="Sure?", previous_response_id=first["id"])
    assert kinds(second["output"]) == ["message"]
    stored = prompt_of(frontend.items[-1])
    turns = [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "Sure?"}]
    await answered(http, input=turns)
    assert prompt_of(frontend.items[-1]) == stored, "the same conversation, sent and stored"
    reply = (await http.get(f"/v1/responses/{first['id']}/input_items")).json()
    responses.ResponseItemList.model_validate(reply, strict=True)


@pytest.mark.gate(1)
@pytest.mark.parametrize("approve", [True, False])
async def test_a_call_that_needs_approval_waits_for_it(http, frontend, sums, says, approve):
    says(ADD, "It is 42." if approve else "As you like.")
    tools = [NEVER | {"require_approval": "always"}]
    asked = await answered(http, tools=tools)
    assert kinds(asked["output"]) == ["mcp_list_tools", "mcp_approval_request"]
    request = asked["output"][1]
    assert (json.loads(request["arguments"]), sums.calls) == ({"a": 40, "b": 2}, [])
    verdict = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve}
    verdict |= {} if approve else {"reason": "Too costly."}
    whole = await answered(http, tools=tools, input=[verdict], previous_response_id=asked["id"])
    if approve:
        assert kinds(whole["output"]) == ["mcp_call", "message"]
        assert whole["output"][0]["approval_request_id"] == request["id"]
        assert sums.calls == [(40, 2)]
        again = await answered(http, tools=tools, input="And?", previous_response_id=whole["id"])
        assert kinds(again["output"]) == ["message"], "what was approved is called once"
    else:
        assert kinds(whole["output"]) == ["message"]
        assert "did not allow this call. Too costly." in prompt_of(frontend.items[-1])
        assert sums.calls == []


@pytest.mark.sweep
async def test_the_clients_own_functions_end_the_response(http, sums, says):
    mine = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}
    says(f'{ADD}\n{{"name": "mine", "arguments": {{}}}}', "Done.")
    whole = await answered(http, tools=[NEVER, mine])
    assert kinds(whole["output"]) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert whole["output"][1]["output"] == "42"
    result = {"type": "function_call_output", "call_id": whole["output"][2]["call_id"], "output": "7"}
    last = await answered(http, tools=[NEVER, mine], input=[result], previous_response_id=whole["id"])
    assert kinds(last["output"]) == ["message"]


async def test_what_goes_wrong_with_a_call_is_told_to_the_model(http, frontend, sums, says):
    says('{"name": "fail", "arguments": {}}', "Sorry.")
    failed = (await answered(http))["output"]
    assert failed[1]["error"]["type"] == "mcp_tool_execution_error"
    assert failed[1]["status"] == "failed"
    assert "Error" in prompt_of(frontend.items[-1])
    says('{"name": "add", "arguments": {"a": "x"}}', "Sorry.")
    assert (await answered(http))["output"][1]["status"] == "failed"
    says('{"name": "fail", "arguments": {}}', "Sorry.")
    assert "response.mcp_call.failed" in [event["type"] for event in await events_of(http)]


@pytest.mark.sweep
async def test_a_call_that_takes_too_long(http, dialect, sums, says):
    dialect._servers.by_label["sums"].timeout = 0.5
    says('{"name": "hang", "arguments": {}}', "Sorry.")
    [_, call, message] = (await answered(http))["output"]
    assert "0.5 seconds" in call["error"]["message"]
    assert message["content"][0]["text"] == "Sorry."
    await asyncio.wait_for(sums.cancelled.wait(), 10)


async def test_a_client_that_goes_away_ends_the_call(http, sums, says):
    says('{"name": "hang", "arguments": {}}', "Sorry.")
    asking = asyncio.ensure_future(answered(http))
    await asyncio.wait_for(sums.hangs.wait(), 10)
    asking.cancel()
    await asyncio.wait_for(sums.cancelled.wait(), 10)


@pytest.mark.gate(1)
@pytest.mark.parametrize("most", [1, None])
async def test_a_model_that_calls_on_and_on_is_stopped(http, frontend, sums, says, most):
    says(ADD)
    whole = await answered(http, **({} if most is None else {"max_tool_calls": most}))
    assert kinds(whole["output"]) == ["mcp_list_tools", *["mcp_call"] * (most or 32), "message"]
    assert len(sums.calls) == (most or 32)
    assert frontend.text.seen.tools is None, "there is nothing left to call"


@pytest.mark.sweep
async def test_calls_beyond_the_last_one_are_refused(http, sums, says):
    says(f"{ADD}\n{ADD}", "Done.")
    whole = await answered(http, max_tool_calls=1)
    assert [item["status"] for item in whole["output"][1:3]] == ["completed", "failed"]
    assert "no more tools" in whole["output"][2]["error"]["message"]
    assert len(sums.calls) == 1


@pytest.mark.sweep
async def test_the_limit_of_tokens_is_that_of_all_rounds(http, frontend, says):
    says(ADD, "It is 42.")
    whole = await answered(http, max_output_tokens=len(ADD) + 4)
    assert frontend.items[-1].sampling.max_tokens == 4
    says(ADD, "It is 42.")
    whole = await answered(http, max_output_tokens=len(ADD))
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.sweep
async def test_in_the_background_and_by_the_client(sdk, http, says):
    says(ADD, "It is 42.")
    started = await sdk.responses.create(model="tiny", input="Hi", tools=[NEVER], background=True)
    for _ in range(500):
        found = await sdk.responses.retrieve(started.id)
        if found.status not in ("queued", "in_progress"):
            break
        await asyncio.sleep(0.02)
    assert (found.status, found.output_text) == ("completed", "It is 42.")
    says(ADD, "It is 42.")
    async with sdk.responses.stream(model="tiny", input="Hi", tools=[NEVER]) as stream:
        async for _ in stream:
            pass
        helped = await stream.get_final_response()
    assert [item.type for item in helped.output] == ["mcp_list_tools", "mcp_call", "message"]


async def test_which_tools_a_request_may_call(http, frontend, says):
    says("Hello.")
    for allowed in (["look"], {"tool_names": ["look"]}, {"read_only": True}):
        whole = await answered(http, tools=[NEVER | {"allowed_tools": allowed}])
        assert [tool["name"] for tool in whole["output"][0]["tools"]] == ["look"]
        assert [tool["function"]["name"] for tool in frontend.text.seen.tools] == ["look"]
    says(ADD, "It is 42.")
    only_add = {"never": {"tool_names": ["add"]}}
    assert kinds((await answered(http, tools=[NEVER | {"require_approval": only_add}]))["output"])[1] == "mcp_call"
    says(ADD, "It is 42.")
    but_add = {"always": {"tool_names": ["add"]}}
    whole = await answered(http, tools=[NEVER | {"require_approval": but_add}])
    assert kinds(whole["output"])[1] == "mcp_approval_request"


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "mcp", "server_label": "sums", "name": "add"},
        {"type": "mcp", "server_label": "sums"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "sums"}]},
    ],
)
async def test_a_call_that_is_asked_for_is_asked_for_once(http, frontend, says, choice):
    says(ADD, "It is 42.")
    frontend.grammar_kinds = frozenset({"tagged", "calls"})
    whole = await answered(http, tool_choice=choice)
    assert kinds(whole["output"]) == ["mcp_list_tools", "mcp_call", "message"]
    assert [item.sampling.grammar is not None for item in frontend.items] == [True, False]


async def test_requests_that_cannot_be_met(http, frontend, says):
    says("Hello.")
    wrong = {
        "no tool server 'other' here, only sums": [NEVER | {"server_label": "other"}],
        "not URLs of requests": [NEVER | {"server_url": "http://169.254.169.254/"}],
        "--tool-server-tokens": [NEVER | {"authorization": "secret"}],
        "has no tool 'drop'": [NEVER | {"allowed_tools": ["drop"]}],
        "must be always, never": [NEVER | {"require_approval": "sometimes"}],
        "is among the tools twice": [NEVER, NEVER],
        "two tools have the same name": [NEVER, {"type": "function", "name": "add"}],
        "no connectors here": [NEVER | {"connector_id": "connector_gmail"}],
        "is not supported, only type": [NEVER | {"color": "red"}],
        "is not supported, only tool_names": [NEVER | {"allowed_tools": {"names": []}}],
    }
    for words, tools in wrong.items():
        assert words in await refused(http, tools=tools)
    verdict = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    assert "no request for approval" in await refused(http, tools=[NEVER], input=[verdict])
    request = {
        "type": "mcp_approval_request",
        "id": "mcpr_1",
        "server_label": "sums",
        "name": "add",
        "arguments": "{}",
    }
    assert "send the tools again" in await refused(http, input=[request, verdict])
    choice = {"type": "mcp", "server_label": "sums", "name": "drop"}
    assert "has no tool 'drop'" in await refused(http, tools=[NEVER], tool_choice=choice)
    assert "not among the tools" in await refused(http, tool_choice={"type": "mcp", "server_label": "sums"})


@pytest.mark.sweep
async def test_a_server_that_went_away(http, frontend, sums, dialect, says):
    says(ADD, "Sorry.")
    dialect._servers.by_label["sums"].url = "http://127.0.0.1:9/mcp"
    await dialect._servers.by_label["sums"].refresh()  # the known list stays
    whole = await answered(http)
    assert whole["output"][1]["error"] == {
        "type": "http_error",
        "code": 503,
        "message": "the tool server cannot be reached",
    }
    assert "Error: the tool server cannot be reached" in prompt_of(frontend.items[-1])


async def test_the_operators_token_and_the_older_transport(sums):
    servers = ToolServers((f"sums={sums.url}", f"old={sums.url}/sse"), "sums=abc", 5.0)
    await servers.connect()
    assert set(sums.tokens) == {"Bearer abc", None}
    result = await servers.by_label["old"].call("add", '{"a": 1, "b": 1}')
    assert result.output == "2"
    result = await servers.by_label["sums"].call("add", "[]")
    assert result.error["message"] == "the arguments are not a JSON object"


async def test_tools_are_listed_again_while_the_server_runs(frontend, sums, monkeypatch):
    monkeypatch.setattr("fwk_server.openai_responses.tool_servers.REFRESH_SECONDS", 0.01)
    context = DialectContext(frontend, ResponsesOptions(tool_server=(f"sums={sums.url}",)))
    dialect = ResponsesDialect(context)
    server = dialect._servers.by_label["sums"]
    [work] = context.lifecycle.work
    refreshing = asyncio.ensure_future(work())
    async with asyncio.timeout(30):
        while not server.tools:
            await asyncio.sleep(0.01)
    refreshing.cancel()
    await asyncio.gather(refreshing, return_exceptions=True)
    assert [tool.name for tool in server.tools] == ["add", "look", "fail", "hang"]


async def test_a_server_that_is_not_there_stops_the_start():
    with pytest.raises(ConfigError, match=r"sums does not list its tools: .*Start it before"):
        await ToolServers(("sums=http://127.0.0.1:9",), None, 5.0).connect()


def test_the_options():
    given = ResponsesOptions.model_validate({"tool_server": "localhost:8001,docs=https://example.com/sse"})
    assert given.tool_server == ("localhost:8001", "docs=https://example.com/sse")
    found = ToolServers(given.tool_server).by_label
    assert {label: server.url for label, server in found.items()} == {
        "localhost-8001": "http://localhost:8001/mcp",
        "docs": "https://example.com/sse",
    }
    for wrong in ("demo", "ftp://x", "a=http://x,a=http://y", "a=http://user:word@x"):
        with pytest.raises(ValidationError):
            ResponsesOptions.model_validate({"tool_server": wrong})
    with pytest.raises(ConfigError, match="which is no --tool-server"):
        ToolServers(("a=http://x",), "b=secret")


def _no_item(name: str) -> Any:
    raise AssertionError(name)


def test_items_of_other_servers_are_checked():
    strange = {"type": "mcp_call", "server_label": "s", "name": "f", "arguments": "not JSON", "error": {"message": "x"}}
    [_, result] = messages_of(None, read_items([strange], _no_item))
    assert result["content"] == "Error: x"
    blocks = {"type": "mcp_tool_execution_error", "content": [{"type": "image", "text": 3, "resource": 4}]}
    [_, result] = messages_of(None, read_items([strange | {"error": blocks}], _no_item))
    assert result["content"] == "Error: [image: not text]"
    for wrong in ({"error": "x"}, {"error": {}}, {"output": 3}, {"name": None}):
        with pytest.raises(InvalidRequest):
            read_items([strange | wrong], _no_item)
