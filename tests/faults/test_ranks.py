"""Check 22: a rank of one of two replicas is killed; the other serves on, and the first comes back whole."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from tests.helpers.client import Streamed, connect, together
from tests.helpers.engine_death import begin
from tests.helpers.rig import Server, is_alive, until
from tests.helpers.servers import Start

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]

FLAGS = ("--tensor-parallel-size", "2", "--data-parallel-size", "2", "--health-monitor", "true")
ROOM = ("--max-running-requests", "4", "--replica-slow-start", "0")
NUM_STREAMS = 16
"""Of which eight run, four on each replica, and eight wait."""

MAX_TOKENS = 400


def ranks_of(engine: psutil.Process) -> list[psutil.Process]:
    """The processes of an engine's ranks."""
    ranks = engine.children()
    assert len(ranks) == 2
    return ranks


def finished(server: Server) -> list[int]:
    return [replica["stats"]["finished"] for replica in server.get("/server_info").json()["replicas"]]


async def expected_of(server: Server) -> list[list[int]]:
    async with connect(server) as client:
        work = [client.complete(prompt=f"stream {i}", max_tokens=MAX_TOKENS) for i in range(NUM_STREAMS)]
        return [tokens for [tokens] in await together(work)]


def outcome(streamed: Streamed) -> list[int] | None:
    """The tokens of a stream that ended well; None of one that was told that its engine died."""
    assert streamed.is_done or streamed.status != 200, "no stream hangs, and none ends without a word"
    if not streamed.errors:
        return streamed.token_ids[0]
    assert len(streamed.errors) == 1
    assert "engine" in streamed.errors[0]["message"]
    return None


async def test_a_rank_killed_beside_another_replica(spawn: Start, tiny: Server) -> None:
    server = spawn(*FLAGS, *ROOM)
    assert server.golden == tiny.golden
    expected = await expected_of(tiny)
    victim, other = server.engines()
    dead, others = ranks_of(victim), ranks_of(other)
    async with connect(server) as client:
        streams, running = await begin(client, NUM_STREAMS, max_tokens=MAX_TOKENS)
        dead[1].send_signal(signal.SIGKILL)
        began = [streamed.has_begun.is_set() for streamed in streams]
        await running
        results = [outcome(streamed) for streamed in streams]
        lost = [i for i, tokens in enumerate(results) if tokens is None]
        assert 1 <= len(lost) <= 4, "only what ran on the replica whose rank died"
        assert all(began[i] for i in lost), "what had no token yet went to the other replica"
        for i, tokens in enumerate(results):
            assert tokens is None or tokens == expected[i], f"stream {i} says what one rank says"
        await asyncio.to_thread(until, lambda: not any(map(is_alive, [victim, *dead])), 5, "no rank outlives the other")
        assert [rank.is_running() for rank in others] == [True, True]
        assert server.health() == 200
        ok = "both replicas serve"
        await asyncio.to_thread(until, lambda: server.get("/health").json()["status"] == "ok", 40, ok)
        assert "(SIGKILL)" in server.log
        assert server.log.count("serves again") == 1
        engines = server.engines()
        assert other in engines
        [new] = [engine for engine in engines if engine != other]
        assert len(ranks_of(new)) == 2
        before = finished(server)
        again = await together(client.complete(prompt=f"stream {i}", max_tokens=MAX_TOKENS) for i in range(8))
        assert [tokens for [tokens] in again] == expected[:8]
        await asyncio.to_thread(until, lambda: sum(finished(server)) - sum(before) >= 8, 5, "reports of both")
        assert all(after > then for after, then in zip(finished(server), before, strict=True))
    server.settle()
    server.check_invariants(may_log_errors=True)
    assert server.stop() == 0
    assert not server.leftovers
