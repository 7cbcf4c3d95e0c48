"""What a request may cost the event loop: each class of attack that held it up, and what others saw meanwhile."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import msgspec
import pytest

from tests.helpers.client import Client, HealthProbe, connect, together
from tests.helpers.http import NO_TLS
from tests.helpers.rig import Server

MAX_BUSY, P99 = 0.5, 0.1
"""Seconds that the API process may compute between two turns of its event loop, and in 99 of 100 cases."""

HANG_SECONDS = 30.0
"""Of wall time, for an answer of /health: what others leave of the cores decides about less."""

YARDSTICK_SECONDS = 0.05
"""Of CPU time, for ``slowness``'s computation where the limits were set. A slower machine, or one whose caches others
use, takes more for everything.
"""

MEGABYTE = 2**20
JSON = {"content-type": "application/json"}
YARDSTICK = msgspec.json.encode({"prompt": [7] * (8 * MEGABYTE // 3)})
STOPS = [*("a" + chr(ord("b") + i) * 1000 for i in range(15)), "a" * 1023 + "b"]
"""The last keeps a text of "a" waiting; each of the others may begin at its end, and at no other of its places."""


def slowness() -> float:
    """How many times as long this machine computes now; 1 at least."""
    started = time.thread_time()
    for _ in range(2):
        msgspec.json.decode(YARDSTICK)
    return max(1.0, (time.thread_time() - started) / YARDSTICK_SECONDS)


async def ask(client: Client, path: str, body: dict[str, Any]) -> int:
    if body.get("stream"):
        return (await client.stream(**body)).status
    return (await client.post(body, path))[0]


async def attack(server: Server, work: list[tuple[str, dict[str, Any]]], wanted: set[int], p99: float = P99) -> None:
    """All requests at once; the loop keeps its budget, and memory is given back."""
    async with connect(server) as client:
        server.loop_times()
        slow = slowness()
        with HealthProbe(server, pause=0.01) as probe:
            statuses = await together([ask(client, path, body) for path, body in work])
        times = server.loop_times()
    slow = max(slow, slowness())
    assert set(statuses) <= wanted, statuses
    assert probe.statuses == {200}
    assert times["busy"] < MAX_BUSY * slow, (times, slow)
    assert times["busy_p99"] < p99 * slow, (times, slow)
    assert probe.slowest < HANG_SECONDS


@pytest.mark.sweep
async def test_long_stop_strings_cost_little(tiny: Server) -> None:
    body = {"prompt": "x", "n": 16, "max_tokens": 450, "allowed_token_ids": [ord("a")], "stop": STOPS}
    for stream in (False, True):
        await attack(tiny, [("/v1/completions", body | {"stream": stream})], {200}, 0.05)


def test_the_lag_of_the_loop_is_a_metric(tiny: Server) -> None:
    page = tiny.get("/metrics").text
    [count] = re.findall(r"^fwk:event_loop_lag_seconds_count\S* (\S+)$", page, re.MULTILINE)
    assert float(count) > 0


async def test_scores_of_prompts_are_bounded(tiny: Server) -> None:
    prompts = ["p" * 1500] * 80
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20}
    async with connect(tiny) as client:
        error = await client.refused(body)
    assert error["param"] == "prompt_logprobs"
    await attack(tiny, [("/v1/completions", body | {"prompt": prompts[:8]})], {200})


@pytest.mark.sweep
async def test_many_large_bodies(tiny: Server) -> None:
    text = {"prompt": "word " * (8 * MEGABYTE // 5), "max_tokens": 1}
    talk = {"messages": [{"role": "user", "content": "x"}] * (8 * MEGABYTE // 40), "max_tokens": 1}
    ids = {"prompt": [7] * (8 * MEGABYTE // 3), "max_tokens": 1}
    work = [("/v1/completions", text), ("/v1/chat/completions", talk), ("/v1/completions", ids)] * 4
    await attack(tiny, work, {400}, 0.35)  # two threads read them, in calls that keep the interpreter to themselves


FIELDS = ("prompt", "messages", "input", "inputs", "query", "documents", "text_1", "tools", "metadata", "items", "stop")
SHAPES = {
    "numbers": b"[" + b"7," * 1_000_000 + b"7]",
    "texts": b"[" + b'"a",' * 1_000_000 + b'"a"]',
    "objects": b"[" + b'{"a":1},' * 130_000 + b"{}]",
    "members": b"{" + b",".join(b'"%d":1' % i for i in range(131_000)) + b"}",
    "key": b'{"' + b"k" * 7 * MEGABYTE + b'":1}',
    "digits": b"9" * 7 * MEGABYTE,
    "depth": b"[" * 120 + b"7," * 900_000 + b"7" + b"]" * 120,
}
"""Values as large as a body may be, which no field takes."""


@pytest.mark.sweep
def test_every_route_bounds_what_is_in_its_fields(tiny: Server) -> None:
    """All routes of all dialects, from the application itself; each field alone, and once it is unknown."""
    for path, operations in tiny.get("/openapi.json").json()["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        fields = content.get("application/json", {}).get("schema", {}).get("properties", {})
        tiny.loop_times()
        for field in [*(name for name in FIELDS if name in fields), *(["unknown"] if content else [])]:
            for shape, value in SHAPES.items():
                body = b'{"%s":%s}' % (field.encode(), value)
                reply = httpx.post(tiny.url + path, content=body, headers=JSON, timeout=240, verify=NO_TLS)
                assert reply.status_code < 500, (path, field, shape, reply.text[:300])
        slow = slowness()
        times = tiny.loop_times()
        assert times["busy"] < MAX_BUSY * slow, (path, times, slow)


@pytest.mark.sweep
@pytest.mark.parametrize("times", [1, 12])
async def test_bodies_of_many_members(tiny: Server, times: int) -> None:
    p99 = P99 if times == 1 else 2 * P99  # of twelve at once, each is taken apart in one go
    bias = {"prompt": "x", "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(700_000)}}
    unknown = {"prompt": "x", "max_tokens": 1} | {f"k{i}": 1 for i in range(600_000)}
    nested = {"messages": [{"role": "user", "content": [{"a": 1}] * 500_000}]}
    await attack(tiny, [("/v1/completions", bias)] * times, {400}, p99)
    await attack(tiny, [("/v1/completions", unknown)] * times, {400}, p99)
    await attack(tiny, [("/v1/chat/completions", nested)] * times, {400}, p99)
