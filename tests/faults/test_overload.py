"""Checks 27, 30 and 31: too many requests, requests that take too long, and clients that do not read."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import time
from typing import Any

import httpx
import pytest

from tests.helpers.client import Client, HealthProbe, Streamed, connect, raw_request, together
from tests.helpers.http import NO_TLS
from tests.helpers.rig import FAKE, NOISE, Server, until
from tests.helpers.servers import Start

SLOW = (*FAKE, "--fake-step-ms", "20")
LONG = 400
"""Tokens of a request that is still there when it is looked at."""


async def fill(client: Client, count: int) -> asyncio.Future[Any]:
    """That many streams under way."""
    streams = [Streamed() for _ in range(count)]
    running = asyncio.ensure_future(
        together(client.stream(s, prompt=f"filler {i}", max_tokens=LONG) for i, s in enumerate(streams))
    )
    await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams)), 20)
    return running


async def give_up(running: asyncio.Future[Any]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def post(server: Server, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=30, verify=NO_TLS) as http:
        return await http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2} | body)


async def test_a_full_queue_refuses_at_once(spawn: Start) -> None:
    """8 run and 4 wait: whatever comes then is told so, and what waits is served."""
    server = spawn(*SLOW, "--max-queued-requests", "4")
    async with connect(server) as client:
        running = await fill(client, 8)
        waiting = [asyncio.create_task(client.complete(prompt=f"waits {i}", max_tokens=2)) for i in range(4)]
        await asyncio.to_thread(until, lambda: server.metric("fwk:num_requests_waiting") == 4, 10, "4 that wait")
        for body in ({}, {"stream": True}, {"n": 2}):
            started = time.monotonic()
            reply = await post(server, **body)
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "1"), reply.text
            assert reply.json()["error"]["type"] == "rate_limit_error"
            assert time.monotonic() - started < 1 + NOISE
        event = httpx.post(f"{server.url}/generate_stream", json={"inputs": "Hi"}, verify=NO_TLS).text
        assert '"error_type":"overloaded"' in event, event
        assert not any(task.done() for task in waiting)
        await give_up(running)
        await together(waiting)
    server.check_invariants()


@pytest.mark.sweep
async def test_served_and_refused_are_all(spawn: Start) -> None:
    """2,000 requests at once: each is answered, with tokens or with 429."""
    server = spawn(*FAKE, "--max-queued-requests", "64", "--concurrency-limit", "256")
    with HealthProbe(server) as probe:
        async with connect(server) as client:
            work = [client.post({"prompt": f"{i}", "max_tokens": 4, "n": 1 + i % 2}) for i in range(2000)]
            replies = await together(work)
    counts = collections.Counter(status for status, _ in replies)
    assert set(counts) == {200, 429}, counts
    assert counts[200] >= 36, counts
    assert all(len(body["choices"][0]["text"]) == 4 for status, body in replies if status == 200)
    assert probe.statuses == {200}
    server.check_invariants()


@pytest.mark.sweep
async def test_a_limit_of_requests_refuses_or_lets_wait(spawn: Start) -> None:
    refusing = spawn(*SLOW, "--concurrency-limit", "2")
    letting_wait = spawn(*SLOW, "--concurrency-limit", "2", "--concurrency-with-block", "--max-queued-requests", "3")
    async with connect(refusing) as client:
        running = await fill(client, 2)
        reply = await post(refusing)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1"), reply.text
        assert httpx.post(f"{refusing.url}/tokenize", json={"prompt": "Hi"}, verify=NO_TLS).status_code == 429
        assert refusing.health() == 200  # whoever only looks is let in
        await give_up(running)
        until(refusing.is_idle, 5, "an idle server")
        assert (await post(refusing)).status_code == 200
    async with connect(letting_wait) as client:
        running = await fill(client, 2)
        waiting = [asyncio.create_task(post(letting_wait)) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert (await post(letting_wait)).status_code == 429
        assert not any(task.done() for task in waiting)
        await give_up(running)
        assert [reply.status_code for reply in await together(waiting)] == [200] * 3
    refusing.check_invariants()
    letting_wait.check_invariants()


async def test_deadlines_end_what_waits_and_what_runs(spawn: Start) -> None:
    server = spawn(*SLOW, "--queue-timeout", "0.5", "--request-timeout", "1.5")
    async with connect(server) as client:
        streams = [Streamed() for _ in range(8)]
        running = asyncio.ensure_future(
            together(client.stream(s, prompt=f"{i}", max_tokens=LONG) for i, s in enumerate(streams))
        )
        await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams)), 20)
        started = time.monotonic()
        plain, streamed = await together([post(server), client.stream(prompt="waits")])
        assert 0.4 < time.monotonic() - started < 1 + NOISE
        assert (plain.status_code, plain.headers["retry-after"]) == (503, "1"), plain.text
        assert (streamed.status, len(streamed.errors)) == (503, 1)
        await running
    for stream in streams:  # begun, so an event tells of the end
        assert (stream.status, stream.is_done, len(stream.errors)) == (200, True, 1)
        assert "1.5 seconds" in stream.errors[0]["message"]
    assert (await post(server, max_tokens=LONG)).status_code == 504
    server.check_invariants()  # nothing of it is computed any more


@pytest.mark.sweep
async def test_a_queue_at_the_turnstile_has_a_deadline(spawn: Start) -> None:
    server = spawn(*SLOW, "--concurrency-limit", "2", "--concurrency-with-block", "--queue-timeout", "1")
    async with connect(server) as client:
        running = await fill(client, 2)
        reply = await post(server)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1"), reply.text
        await give_up(running)
    server.check_invariants()


@pytest.mark.sweep
async def test_clients_that_do_not_read(spawn: Start) -> None:
    """They are cut off, their requests stop, and those that read notice nothing."""
    server = spawn(*FAKE, "--write-timeout", "1")
    head, data = raw_request(
        {"prompt": "silent", "max_tokens": 1900, "n": 2, "stream": True, "return_token_ids": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )  # fmt: skip
    host, port = server.url.removeprefix("http://").split(":")
    async with connect(server) as client:
        alone = await _steps_of_a_reader(server, client)
    with contextlib.ExitStack() as open_sockets:
        for _ in range(2):
            silent = open_sockets.enter_context(socket.socket())
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect((host, int(port)))
            silent.sendall(head + data)
        async with connect(server) as client:
            alongside = await _steps_of_a_reader(server, client)
        assert alongside < 1.2 * alone + 100, (alone, alongside)
        until(lambda: server.log.count("did not read its reply") == 2, 10, "the end of both")
        server.check_invariants()  # while their ends of the connections are open


async def _steps_of_a_reader(server: Server, client: Client) -> int:
    """The steps that the engine makes until all of a stream has been read."""
    before = server.stats()["steps"]
    reading = await client.stream(prompt="reads", max_tokens=1500, ignore_eos=True)
    assert (reading.is_done, reading.errors) == (True, [])
    return server.stats()["steps"] - before


@pytest.mark.sweep
async def test_readers_of_a_byte_a_second_slow_nobody_down(spawn: Start) -> None:
    """16 of them alongside 4 that read."""
    server = spawn("--executor", "fake", "--fake-step-ms", "20", "--max-running-requests", "32")
    head, data = raw_request({"prompt": "slow", "max_tokens": 1900, "stream": True, "ignore_eos": True})
    host, port = server.url.removeprefix("http://").split(":")

    async def fast(client: Client) -> int:
        """The steps the engine makes for four of them."""
        before = server.stats()["steps"]
        work = [client.stream(prompt=f"fast {i}", max_tokens=100, ignore_eos=True) for i in range(4)]
        streams: list[Streamed] = await together(work)
        assert all(stream.is_done and not stream.errors for stream in streams)
        return server.stats()["steps"] - before

    async with connect(server) as client:
        alone = await fast(client)
        with contextlib.ExitStack() as open_sockets:
            slow = [open_sockets.enter_context(socket.socket()) for _ in range(16)]
            for one in slow:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect((host, int(port)))
                one.sendall(head + data)
            until(lambda: server.metric("fwk:num_requests_running") == 16, 10, "all of them under way")
            reading = asyncio.create_task(_sip(slow))
            alongside = await fast(client)
            reading.cancel()
    assert alongside < 1.2 * alone + 25, (alone, alongside)  # the books are half a second old at most
    server.check_invariants()


async def _sip(sockets: list[socket.socket]) -> None:
    while True:
        for one in sockets:
            await asyncio.to_thread(one.recv, 1)
        await asyncio.sleep(1)
