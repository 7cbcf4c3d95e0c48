"""What a connection's writer waits on, and clients who may have gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from tests.helpers.http_app import listening

from fwk_http import connection
from fwk_http.connection import _PatientFlow, protocol
from fwk_http.server import Bounds


@pytest.mark.parametrize("turns", range(5))
async def test_a_lost_connection_ends_the_writer_that_waits_for_room(turns: int) -> None:
    """Losing it wakes the writer, and its task is cancelled a few turns of the loop later."""
    flow = _PatientFlow(Mock(), 60)

    async def write() -> None:
        await flow.drain()
        await asyncio.sleep(60)  # for the next piece

    flow.pause_writing()
    writer = asyncio.ensure_future(write())
    await asyncio.sleep(0.01)
    flow.resume_writing()
    for _ in range(turns):
        await asyncio.sleep(0)
    writer.cancel()
    await asyncio.wait([writer], timeout=5)
    assert writer.cancelled()


async def test_a_reader_who_does_not_read_is_hung_up_on() -> None:
    transport = Mock()
    flow = _PatientFlow(transport, 0.05)
    transport.abort = flow.resume_writing  # as the loss of the connection does
    flow.pause_writing()
    await asyncio.wait_for(flow.drain(), 5)


@pytest.mark.gate(1)
@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_half_closed_client_of_http_1_0_gets_its_reply(is_gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_SECONDS", 1)
    go, begun, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        begun.set()
        waiting = [asyncio.ensure_future(go.wait()), asyncio.ensure_future(receive())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        ended.set()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})
        for task in waiting:
            task.cancel()

    bounds = Bounds(60, 60, None, lambda status, message: b"{}")
    async with listening(app, http=protocol(bounds), lifespan="off") as url:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"POST / HTTP/1.0\r\nhost: localhost\r\ncontent-length: 1\r\n\r\nx")
        await asyncio.wait_for(begun.wait(), 20)
        writer.write_eof()
        await asyncio.sleep(0.1)
        if is_gone:
            linger = struct.pack("ii", 1, 0)  # a reset, as of a client that ends with something unread
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            await asyncio.wait_for(ended.wait(), 20)
            assert not go.is_set()
        else:
            assert not ended.is_set(), "it is waited for"
            go.set()
            assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"hi")
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
