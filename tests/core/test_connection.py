"""What a connection's writer waits on."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from fwk_http.connection import _PatientFlow


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
