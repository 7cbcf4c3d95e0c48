"""Constrained output and forced calls of a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.http import NO_TLS
from tests.helpers.rig import Server
from tests.helpers.servers import Start

TEMPLATE = (
    "{% if tools %}<tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"enum": [1, 2, 3]}},
    "required": ["on", "level"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "switch", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"properties": {}, "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def able(spawn: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The template's marks choose the tool parser."""
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    return spawn("--chat-template", str(template), "--constrained-json-disable-any-whitespace", "true")


async def post(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 400} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def check_call(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "switch":
        assert set(arguments) == {"on", "level"}
        assert isinstance(arguments["on"], bool)
        assert arguments["level"] in (1, 2, 3)
    else:
        assert (call["function"]["name"], arguments) == ("stop", {})


@pytest.mark.sweep
async def test_a_random_model_makes_valid_calls_when_it_must(able: Server) -> None:
    named = {"type": "function", "function": {"name": "switch"}}
    async with httpx.AsyncClient(base_url=able.url, timeout=60, verify=NO_TLS) as http:
        one = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        bodies = [one | {"seed": i} for i in range(12)] + [one | {"tool_choice": named, "seed": i} for i in range(4)]
        choices = await asyncio.gather(*(post(http, **body) for body in bodies))
    for choice in choices:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        check_call(call)
    assert {c["message"]["tool_calls"][0]["function"]["name"] for c in choices[:12]} == {"switch", "stop"}
    assert all(c["message"]["tool_calls"][0]["function"]["name"] == "switch" for c in choices[12:])


@pytest.mark.sweep
async def test_constrained_output_and_its_errors(able: Server) -> None:
    async with httpx.AsyncClient(base_url=able.url, timeout=60, verify=NO_TLS) as http:
        for seed in range(4):
            choice = await post(
                http, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}, seed=seed
            )
            check_call({"function": {"name": "switch", "arguments": choice["message"]["content"]}})
            assert choice["finish_reason"] == "stop"
        for path, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "Hi"})):
            wrong = await http.post(path, json=body | {"regex": "(", "stream": True})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "regex")
        wrong = await http.post("/v1/completions", json={"prompt": "Hi", "guided_json": {"type": "person"}})
        assert "not 'person'" in wrong.json()["error"]["message"]
        info = (await http.get("/server_info")).json()
    assert info["chosen"]["grammar"] == "llguidance"
    able.check_invariants()


@pytest.mark.sweep
async def test_without_tools_in_the_template_they_are_plain_json(tiny: Server) -> None:
    async with httpx.AsyncClient(base_url=tiny.url, timeout=60, verify=NO_TLS) as http:
        choice = await post(http, tools=TOOLS, tool_choice="required", max_tokens=400)
        assert choice["finish_reason"] in ("tool_calls", "length")
        for call in choice["message"].get("tool_calls", []):
            check_call(call)
        plain = await post(http, tools=TOOLS, max_tokens=4)
        assert plain["finish_reason"] in ("stop", "length")


@pytest.mark.sweep
async def test_plain_json_forces_what_a_format_and_its_backend_cannot_say_together(
    spawn: Start, tmp_path: Path
) -> None:
    """In XML formats a string has a pattern, that keeps the format's marks out; XGrammar keeps no length beside one."""
    pytest.importorskip("xgrammar")
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    options = ("--chat-template", str(template), "--tool-call-parser", "qwen3-coder", "--grammar-backend", "xgrammar")
    server = spawn(*options, "--constrained-json-disable-any-whitespace")
    short = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}, "minItems": 1, "maxItems": 2}
    schema = {"type": "object", "properties": {"words": short}, "required": ["words"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "say", "parameters": schema}}]
    async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=NO_TLS) as http:
        one = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        choices = [await post(http, **one, seed=seed) for seed in range(3)]
    for choice in choices:
        (call,) = choice["message"]["tool_calls"]
        words = json.loads(call["function"]["arguments"])["words"]
        assert 1 <= len(words) <= 2
        assert all(1 <= len(word) <= 3 for word in words)
