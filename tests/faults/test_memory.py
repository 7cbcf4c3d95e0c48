"""Check 26: there is no more memory, in one request's plugin or for the whole engine."""

from __future__ import annotations

import asyncio
import resource

import pytest

from tests.helpers.client import Streamed, connect, together
from tests.helpers.rig import Server, until
from tests.helpers.servers import Start

pytestmark = pytest.mark.sweep


async def test_one_request_has_none(tiny: Server) -> None:
    """A processor that cannot have memory is as one that raises anything else: its request fails alone."""
    async with connect(tiny) as client:
        alone = await client.complete(prompt="alongside", max_tokens=30)
        bad = {"prompt": "greedy for memory", "max_tokens": 20, "fault": "memory:5"}
        (status, body), alongside = await together(
            [client.post(bad), client.complete(prompt="alongside", max_tokens=30)]
        )
    assert (status, body["error"]["type"]) == (500, "server_error"), body
    assert alongside == alone
    tiny.check_invariants(may_log_errors=True)


async def test_the_engine_has_none(spawn: Start) -> None:
    """Its address space may grow no more: it serves on or it is dead, at once and with a reason; never in between."""
    server = spawn("--health-monitor", "--max-prefill-tokens", "4096", "--chunked-prefill-size", "4096", forked=False)
    assert server.engine is not None
    room = server.engine.memory_info().data
    resource.prlimit(server.engine.pid, resource.RLIMIT_DATA, (room, room))
    async with connect(server) as client:
        streams = [Streamed() for _ in range(48)]
        work = (
            client.stream(s, prompt=[i] * 1900, max_tokens=20, n=4, fault="memory:9999") for i, s in enumerate(streams)
        )
        await asyncio.wait_for(together(work), 40)
    for stream in streams:
        whole = stream.is_done and len(stream.reasons) == 4 and not stream.errors
        told = len(stream.errors) == 1 and (stream.is_done or stream.status in (500, 503))
        assert whole or told, stream
    assert any(stream.errors for stream in streams), "there was memory enough: the check checks nothing"
    until(lambda: server.health() == 200, 20, "an engine, this one or the next")
    reply = server.post({"prompt": "Hi", "max_tokens": 2})
    assert reply.status_code == 200
    assert "engine dead" in server.log
    assert server.stop() == 0
    assert not server.leftovers
