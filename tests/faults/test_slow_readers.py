"""Check 27: a client that does not read costs the server what fits into its buffers, and no blocks."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import psutil
import pytest

from tests.helpers.client import Streamed, connect, raw_request
from tests.helpers.rig import Server, until

BODY = {"prompt": "x", "max_tokens": 200, "temperature": 0, "logprobs": 20, "return_token_ids": True}
N = 8
MAX_GROWTH_MB = 50


async def open_slow(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that takes in next to nothing unless it is read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    return await asyncio.open_connection(sock=connection, limit=4096)


def is_held(server: Server) -> bool:
    """Its sequences wait, though nothing runs and all blocks are free."""
    stats = server.stats()
    return stats["num_waiting"] == N and stats["num_running"] == 0 and stats["num_held_blocks"] == 0


@pytest.mark.sweep
async def test_a_request_whose_reader_does_not_read_is_paused(tiny: Server) -> None:
    body: dict[str, Any] = BODY | {"n": N, "stream": True}
    async with connect(tiny) as client:
        wanted = (await client.stream(**body)).token_ids
        reader, writer = await open_slow(tiny)
        head, data = raw_request(body)
        writer.write(head + data)
        await reader.readexactly(8)
        await asyncio.to_thread(until, lambda: is_held(tiny), 20, "a pause", 0.05)
        await client.complete(prompt="others continue", max_tokens=4)
        assert is_held(tiny)
        streamed = Streamed()
        while not streamed.is_done:
            line = (await asyncio.wait_for(reader.readuntil(b"\n"), 20)).decode().rstrip("\r\n")
            if line.startswith("data: "):
                streamed.take(line)
        writer.close()
    assert streamed.token_ids == wanted
    assert not streamed.errors
    tiny.check_invariants()


@pytest.mark.sweep
async def test_a_paused_request_ends_with_its_client(tiny: Server) -> None:
    reader, writer = await open_slow(tiny)
    head, data = raw_request(BODY | {"n": N, "stream": True})
    writer.write(head + data)
    await reader.readexactly(8)
    await asyncio.to_thread(until, lambda: is_held(tiny), 20, "a pause", 0.05)
    writer.transport.abort()
    await asyncio.to_thread(tiny.check_invariants)


@pytest.mark.sweep
async def test_four_readers_that_do_not_read_take_little_memory(tiny: Server) -> None:
    """An attack that took 87 to 1,199 MB: many sequences, each token with the scores of twenty others."""
    body = BODY | {"n": 64, "max_tokens": 400, "stream": True}
    async with connect(tiny) as client:
        await client.stream(**body)  # what one that reads takes is not counted
    await asyncio.to_thread(tiny.settle)
    processes = [psutil.Process(tiny.process.pid), *tiny.engines()]
    before = [process.memory_info().rss for process in processes]
    writers = []
    for _ in range(4):
        reader, writer = await open_slow(tiny)
        head, data = raw_request(body)
        writer.write(head + data)
        await reader.readexactly(8)
        writers.append(writer)
    await asyncio.to_thread(until, lambda: not tiny.stats()["num_running"], 60, "all paused", 0.05)
    after = [process.memory_info().rss for process in processes]
    for writer in writers:
        writer.transport.abort()
    growth = [(b - a) / 2**20 for a, b in zip(before, after, strict=True)]
    assert sum(growth) < MAX_GROWTH_MB, growth
    await asyncio.to_thread(tiny.check_invariants)
