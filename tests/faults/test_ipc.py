"""Check 43: the engine listens to the process that started it, and to nobody else."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from fwk import SamplingParams
from fwk.engine.loop import MAX_MESSAGE_BYTES
from fwk.types import Abort, AddRequest, CallFeature, Ping, Request, Shutdown
from tests.helpers.client import connect
from tests.helpers.rig import Server, until

ENCODE = msgspec.msgpack.Encoder().encode
REQUEST = Request(request_id="stranger", prompt_token_ids=[65, 66], sampling=SamplingParams(max_tokens=3))
MESSAGES = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 16,
    "a type nobody knows": ENCODE({"type": "Evil", "code": "import os"}),
    "a field of another type": ENCODE({"type": "Ping", "number": "one"}),
    "a ping": ENCODE(Ping(1)),
    "another version": ENCODE(Ping(1, protocol=99)),
    "a request": ENCODE(AddRequest(REQUEST)),
    "an abort": ENCODE(Abort("0" * 32)),
    "an adapter": ENCODE(CallFeature(1, "lora", "load", ["evil", "/etc"])),
    "the end": ENCODE(Shutdown()),
}


def address(server: Server) -> Path:
    (found,) = server.folder.rglob("*.sock")
    return found


@pytest.fixture
def stranger(fake: Server) -> Iterator[zmq.Socket[bytes]]:
    """A process of the same user that has found the socket."""
    context = zmq.Context[zmq.Socket[bytes]]()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 1000)
    client.connect(f"ipc://{address(fake)}")
    yield client
    client.close()
    context.term()


def test_the_folder_is_ours_alone(fake: Server) -> None:
    assert stat.S_IMODE(address(fake).parent.stat().st_mode) == 0o700


async def test_strangers_are_not_listened_to(fake: Server, stranger: zmq.Socket[bytes]) -> None:
    before = fake.stats()["dropped_messages"]
    async with connect(fake) as client:
        alone = await client.complete(prompt="alongside strangers", max_tokens=30)
        for message in MESSAGES.values():
            for parts in ([message], [b"", message], [message, message]):
                stranger.send_multipart(parts)
        assert await client.complete(prompt="alongside strangers", max_tokens=30) == alone
    sent = 3 * len(MESSAGES)
    until(lambda: fake.stats()["dropped_messages"] == before + sent, 5, "every message counted")
    assert fake.metric("fwk:engine_dropped_messages_total") == before + sent
    assert not stranger.poll(200), "a stranger was answered"
    assert "dropped a message that came from a stranger" in fake.log
    fake.check_invariants()


def test_what_is_no_message_at_all(fake: Server, stranger: zmq.Socket[bytes]) -> None:
    """Another protocol on the socket, and a message past the limit: the connection ends, the engine does not."""
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"\xff" * 64 + b"\x7f" * 10_000):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(address(fake)))
            raw.sendall(data)
    events = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    has_ended = events.poll(10_000)
    stranger.disable_monitor()
    events.close()
    assert has_ended, "the connection continues past the limit"
    fake.check_invariants()
