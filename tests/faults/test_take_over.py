"""A new server takes the listening socket of the old one: no request is lost, and one that fails changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from fwk_http import handover
from tests.helpers.client import Streamed, connect, dial, raw_request
from tests.helpers.rig import FAKE, Server, until
from tests.helpers.servers import Shared, Start

SLOW = (*FAKE, "--fake-step-ms", "20", "--shutdown-timeout", "30")


def port_of(server: Server) -> str:
    return server.url.rpartition(":")[2]


def connections_of(server: Server) -> list[Any]:
    """Those that the server has accepted."""
    process = psutil.Process(server.process.pid)
    return [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]


@contextlib.asynccontextmanager
async def visitors(server: Server) -> AsyncIterator[list[int]]:
    """One request after the other, three on each connection and the first visitor's all on one; the statuses."""
    statuses: list[int] = []
    is_over = asyncio.Event()

    async def visit(i: int) -> None:
        while not is_over.is_set():
            async with connect(server) as client:
                for number in itertools.count():
                    if is_over.is_set() or (i and number == 3):
                        break
                    with contextlib.suppress(aiohttp.ClientConnectionError):  # closed at rest: clients ask again
                        status, _ = await client.post({"prompt": f"visitor {i}", "max_tokens": 2})
                        statuses.append(status)

    tasks = [asyncio.create_task(visit(i)) for i in range(4)]
    yield statuses
    is_over.set()
    await asyncio.gather(*tasks)


async def replaced(spawn: Start, old: Server) -> Server:
    """The server that has taken over from an old one under load."""
    async with connect(old) as client, visitors(old) as statuses:
        streamed = Streamed()
        running = asyncio.create_task(client.stream(streamed, prompt="long", max_tokens=400))
        await streamed.has_begun.wait()
        new = await asyncio.to_thread(spawn, *SLOW, "--port", port_of(old), "--take-over", "true")
        await asyncio.to_thread(until, lambda: "has taken over" in old.log, 10, "the old one told")
        seen = len(statuses)
        await running
        assert await asyncio.to_thread(old.wait, 20) == 0
        async with asyncio.timeout(100):
            while len(statuses) < seen + 20:
                await asyncio.sleep(0.01)
    assert set(statuses) == {200}
    assert (streamed.is_done, streamed.errors, streamed.reasons) == (True, [], {0: "length"})
    assert not old.leftovers
    new.check_invariants()
    return new


@pytest.mark.sweep
async def test_no_request_is_lost(spawn: Start) -> None:
    second = await replaced(spawn, spawn(*SLOW))
    third = await replaced(spawn, second)  # a successor has successors
    assert third.stop() == 0


@pytest.fixture(scope="module")
def shared(spawn: Start) -> Shared:
    return Shared(spawn, SLOW)


@pytest.fixture
def old(shared: Shared) -> Server:
    return shared.server()


@pytest.mark.sweep
def test_one_that_fails_changes_nothing(spawn: Start, old: Server, tmp_path: Path) -> None:
    """The plugins are not those of the lock: it ends before the old one is notified."""
    lock = tmp_path / "lock.json"
    lock.write_text(json.dumps({"fingerprint": "x", "plugins": {}}))
    with pytest.raises(AssertionError, match="plugins-lock"):
        spawn(*SLOW, "--port", port_of(old), "--take-over", "true", "--plugins-lock", str(lock))
    taken = handover.take_listener(("127.0.0.1", int(port_of(old))))
    assert taken is not None
    taken[0].close()
    taken[1]._connection.close()  # killed before it serves
    old.check_invariants()
    assert "has taken over" not in old.log


async def test_those_who_have_just_connected_are_answered(spawn: Start, old: Server) -> None:
    """By the old server, which has accepted them, however long after the change they speak."""
    head, data = raw_request({"prompt": "late", "max_tokens": 2})
    silent, halfway = await dial(old), await dial(old)
    halfway[1].write(head[:20])  # no request yet, by which the old one would be held
    await asyncio.to_thread(until, lambda: len(connections_of(old)) >= 2, 10, "both accepted")
    new = await asyncio.to_thread(spawn, *SLOW, "--port", port_of(old), "--take-over", "true")
    await asyncio.to_thread(until, lambda: "has taken over" in old.log, 10, "the old one told")
    await asyncio.sleep(1.5)  # past what it waited when it did not look
    silent[1].write(head + data)
    halfway[1].write(head[20:] + data)
    for reader, writer in (silent, halfway):
        reply = await asyncio.wait_for(reader.read(), 100)
        assert reply.startswith(b"HTTP/1.1 200"), reply
        writer.close()
        await writer.wait_closed()
    assert await asyncio.to_thread(old.wait, 20) == 0
    assert new.stop() == 0


@pytest.mark.sweep
def test_without_an_old_one_it_listens(spawn: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = spawn(*SLOW, "--port", str(port), "--take-over", "true")
    assert "no server to take over from" in server.log
    server.check_invariants()


async def offered(ask: Callable[[tuple[str, int]], object]) -> object:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = handover.Offer(listener)
        waiting = asyncio.create_task(made.taken())
        try:
            return await asyncio.to_thread(ask, listener.getsockname())
        finally:
            made.release()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_other_users_get_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()

    def user_of(connection: socket.socket) -> int:
        """The old one, which is the main thread, sees another user; the successor does not."""
        return me + (threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(handover, "_user_of", user_of)
    with pytest.raises(ConnectionError, match="nobody"):
        await offered(handover.take_listener)


async def test_nor_is_one_taken_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_user_of", lambda _: os.geteuid() + 1)
    with pytest.raises(PermissionError):
        await offered(handover.take_listener)
