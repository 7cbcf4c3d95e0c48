"""Checks 19, 20 and 21: an engine that is killed or hangs is noticed at once, and nothing outlives the server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time

import httpx
import psutil
import pytest

from tests.helpers.client import connect
from tests.helpers.engine_death import AT_ONCE, begin, check_dead, check_ended
from tests.helpers.rig import FAKE, NOISE, Server, is_alive, until
from tests.helpers.servers import Start

SLOW = (*FAKE, "--fake-step-ms", "20")
NUM_STREAMS = 32


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["fake", "tiny"])
def test_killed_while_idle(spawn: Start, kind: str) -> None:
    server = spawn(*(SLOW if kind == "fake" else ()))
    server.signal_engine(signal.SIGKILL)
    check_dead(server)
    assert server.engines(recursive=True) == []
    check_ended(server)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_killed_under_streams(spawn: Start, number: signal.Signals) -> None:
    server = spawn(*SLOW)
    async with connect(server) as client:
        streams, running = await begin(client, NUM_STREAMS)
        plain = asyncio.ensure_future(client.post({"prompt": "not streamed", "max_tokens": 400}))
        waiting = NUM_STREAMS + 1 - 8
        await asyncio.to_thread(
            until, lambda: server.metric("fwk:num_requests_waiting") == waiting, 5, "all of them to arrive"
        )
        killed = time.monotonic()
        server.signal_engine(number)
        await running
        assert max(stream.ended for stream in streams) - killed < AT_ONCE + NOISE
        status, body = await plain
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    begun = [stream for stream in streams if stream.has_begun.is_set()]
    assert len(begun) >= 8
    for stream in streams:
        assert len(stream.errors) == 1, stream
        assert "engine" in stream.errors[0]["message"]
        # What has not begun yet can still be told by the status; what has, by an event and an ordinary end.
        assert (stream.status, stream.is_done) == ((200, True) if stream in begun else (503, False))
    check_dead(server)
    check_ended(server)


@pytest.mark.sweep
async def test_exit_in_a_step(spawn: Start) -> None:
    server = spawn(*SLOW)
    async with connect(server) as client:
        streams, running = await begin(client, 4)
        bad = await client.stream(prompt="exit", max_tokens=50, fault="exit:3")
        await running
    assert all(len(stream.errors) == 1 and stream.is_done for stream in streams)
    # The tokens of its two steps may have died with the engine: then the status tells.
    assert (len(bad.errors), bad.status, bad.is_done) in [(1, 200, True), (1, 503, False)]
    assert "exit code 99" in server.get("/health").json()["reason"]
    check_dead(server)
    check_ended(server)


@pytest.mark.sweep
async def test_stopped_and_continued(spawn: Start) -> None:
    server = spawn(*SLOW, "--ping-timeout", "1.5")
    async with connect(server) as client:
        alone = await client.complete(prompt="stream 0", max_tokens=60)
        streams, running = await begin(client, 4, max_tokens=60)
        stopped = time.monotonic()
        server.signal_engine(signal.SIGSTOP)
        until(lambda: server.health() == 503, 1.5, "health 503")
        assert time.monotonic() - stopped > 0.5, "an engine is not hung after half a second"
        assert "not answered" in server.get("/health").json()["reason"]
        assert (await client.post({"prompt": "Hi"}))[0] == 503
        server.signal_engine(signal.SIGCONT)
        until(lambda: server.health() == 200, AT_ONCE, "health 200")
        await running
    assert streams[0].token_ids == {0: alone[0]}
    assert all(stream.is_done and not stream.errors for stream in streams)
    server.check_invariants()
    server.signal_engine(signal.SIGSTOP)  # a server whose engine hangs must end, too
    check_ended(server)


@pytest.mark.sweep
def test_a_long_step_is_no_death(fake: Server) -> None:
    """Shorter than the ping timeout: nobody is told anything."""
    reply = fake.post({"prompt": "slow", "max_tokens": 4, "temperature": 0, "fault": "sleep:2"})
    assert reply.status_code == 200
    fake.check_invariants()


@pytest.mark.sweep  # tests/faults/test_lifecycle.py kills one whose engine is stopped
@pytest.mark.parametrize("is_busy", [False, True])
async def test_no_orphans_of_a_killed_server(spawn: Start, is_busy: bool) -> None:
    server = spawn(*SLOW)
    port = int(server.url.rpartition(":")[2])
    async with connect(server) as client:
        running = None
        if is_busy:
            _, running = await begin(client, NUM_STREAMS)
        assert server.engine is not None
        psutil.Process(server.process.pid).kill()
        server.process.wait(5)
        until(lambda: not is_alive(server.engine), 5, "the end of the engine")
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    assert not server.leftovers, server.leftovers
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
    with pytest.raises(httpx.TransportError):
        server.get("/health")
