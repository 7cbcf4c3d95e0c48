"""Check 42: whatever one request costs, the others' event loop stays awake."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.client import Client, HealthProbe, connect
from tests.helpers.rig import Server

pytestmark = pytest.mark.sweep

MOST, P99 = 1.0, 0.2
"""Seconds the event loop may compute in one go, and nearly always."""

MEGABYTE = 2**20


def tool(i: int) -> dict[str, Any]:
    properties = {f"p{j}": {"type": "string", "description": "d" * 50} for j in range(8)}
    return {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"properties": properties}}}


def schema(depth: int, width: int) -> dict[str, Any]:
    """Objects in objects, each with many fields."""
    inner: dict[str, Any] = schema(depth - 1, width) if depth else {"type": "string", "pattern": "[a-z]{1,20}"}
    return {"type": "object", "properties": {f"field_{i}": inner for i in range(width)}, "additionalProperties": False}


USER = {"role": "user", "content": "Hi"}
WORK: list[tuple[str, str, dict[str, Any]]] = [
    ("8 MB to tokenise", "/tokenize", {"prompt": "word " * (8 * MEGABYTE // 5)}),
    ("8 MB in one message", "/v1/chat/completions", {"messages": [USER | {"content": "word " * (8 * MEGABYTE // 5)}]}),
    ("10,000 messages for the template", "/v1/chat/completions", {"messages": [USER] * 10_000}),
    ("1,000 tools", "/v1/chat/completions", {"messages": [USER], "tools": [tool(i) for i in range(1000)]}),
    ("as many tools as may be", "/v1/chat/completions", {"messages": [USER], "tools": [tool(i) for i in range(128)]}),
    ("a large schema", "/v1/completions",
     {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema(3, 6)}}),
    ("an enum of 8,000", "/v1/completions",
     {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": [f"choice {i}" for i in range(8000)]}}),
    ("a nested regex", "/v1/completions",
     {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "((a{1,50}b{1,50}){1,50}c){1,20}"}}),
]  # fmt: skip


async def ask(client: Client, path: str, body: dict[str, Any]) -> int:
    return (await client.post(json.dumps(body).encode(), path))[0]


async def test_the_loop_stays_awake(tiny: Server) -> None:
    async with connect(tiny) as client:
        for _, path, body in WORK:  # what Python keeps of the largest of them, once
            await ask(client, path, body)
        tiny.settle()
        for name, path, body in WORK:
            tiny.loop_times()
            with HealthProbe(tiny, pause=0.05) as probe:
                assert await ask(client, path, body) in (200, 400), name
            assert probe.statuses <= {200}
            times = tiny.loop_times()
            assert times["busy"] < MOST, (name, times)
            assert times["busy_p99"] < P99, (name, times)
    tiny.check_invariants()
