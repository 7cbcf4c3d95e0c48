"""What the engine's loop takes from its client, message by message, without a process around it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from fwk import SamplingParams
from fwk.engine.loop import MAX_MESSAGE_BYTES, EngineLoop, bind, meet
from fwk.types import (
    Abort,
    AddRequest,
    CallFeature,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    Ping,
    Pong,
    Request,
    Shutdown,
)

CLIENT = b"the-client"
ENCODE = msgspec.msgpack.encode
STRANGE = (
    bytes(range(256)) * 16,
    ENCODE(Ping(1)),
    ENCODE(AddRequest(Request(request_id="stranger", prompt_token_ids=[65], sampling=SamplingParams()))),
    ENCODE(Abort("0" * 32)),
    ENCODE(CallFeature(1, "lora", "load", ["evil", "/etc"])),
    ENCODE(Shutdown()),
)
READY = EngineReady("f", 8, 16, 64, 512, {}, [])


class Engine:
    """Knows what it was given, and does nothing with it."""

    has_work = False

    def __init__(self) -> None:
        self.added: list[str] = []
        self.scheduler = SimpleNamespace(knows=self.added.__contains__)

    def add(self, request: Request) -> list[Any]:
        self.added.append(request.request_id)
        return []

    def check(self) -> None:
        """All is well."""

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=len(self.added))


class Wire:
    """A loop and the socket of its client."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self.path = folder / "s"
        self._address = address = f"ipc://{self.path}"
        self.engine: Any = Engine()
        self._bound = bind(self._context, address)
        self._loop = EngineLoop(self.engine, self._bound, READY, CLIENT)
        self._client = self._context.socket(zmq.DEALER)
        self._client.setsockopt(zmq.IDENTITY, CLIENT)
        self._client.connect(address)

    def run(self, *messages: Any) -> list[FromEngine]:
        """What the loop answers to messages (ready bytes are sent as they are); it ends afterwards."""
        for message in (*messages, Shutdown()):
            self._client.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
        self._loop.run()
        answers: list[FromEngine] = []
        while self._client.poll(200):
            answers.append(msgspec.msgpack.decode(self._client.recv(), type=FromEngine))
        return answers

    def meet(self) -> None:
        """As the engine process does before it loads."""
        self._client.send(ENCODE(Ping(0)))
        meet(self._bound, self._address, CLIENT.decode())

    @contextmanager
    def stranger(self) -> Iterator[zmq.Socket[bytes]]:
        """Another process of the same user, which has found the socket."""
        with self._context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(self._address)
            yield stranger

    def close(self) -> None:
        self._client.close(linger=0)
        self._bound.close(linger=0)
        self._context.term()


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path)
    yield wire
    wire.close()


def test_the_first_ping_is_greeted(wire: Wire) -> None:
    ready, *pongs = wire.run(Ping(1), Ping(2))
    assert ready == READY
    assert pongs == [Pong(1, EngineStats()), Pong(2, EngineStats())]


def test_a_request_that_comes_twice_is_one(wire: Wire) -> None:
    """Whoever waits for the first must not be told that it failed."""
    request = AddRequest(Request(request_id="a", prompt_token_ids=[1], sampling=SamplingParams()))
    _, pong = wire.run(request, request, request, Ping(1))
    assert wire.engine.added == ["a"]
    assert isinstance(pong, Pong)
    assert pong.stats.dropped_messages == 2


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x81\xa4type\xa4Evil", msgspec.msgpack.encode(["Ping", 1])])
def test_what_is_not_of_the_protocol_is_dropped(wire: Wire, message: bytes) -> None:
    _, pong = wire.run(message, Ping(1))
    assert isinstance(pong, Pong)
    assert pong.stats.dropped_messages == 1


def test_a_client_of_another_version_is_told(wire: Wire) -> None:
    (answer,) = wire.run(Ping(1, protocol=99))
    assert isinstance(answer, EngineFailed)
    assert "protocol" in answer.message


def test_strangers_are_not_listened_to_nor_answered(wire: Wire) -> None:
    with wire.stranger() as stranger:
        for message in STRANGE:
            stranger.send_multipart([message, message])
        assert wire.run(Ping(1))[0] == READY
        assert not stranger.poll(100)
    assert not wire.engine.added


def test_a_message_past_the_limit_ends_its_connection_alone(wire: Wire) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"\xff" * 64 + b"\x7f" * 10_000):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(wire.path))
            raw.sendall(data)
    with wire.stranger() as stranger:
        events = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        has_ended = events.poll(10_000)
        stranger.disable_monitor()
        events.close()
    assert has_ended, "the connection continues past the limit"
    assert wire.run(Ping(1))[0] == READY


def test_nobody_else_can_connect_once_the_client_has_come(wire: Wire) -> None:
    with wire.stranger() as stranger:
        stranger.send(STRANGE[-1])
        wire.meet()
        assert not wire.path.exists()
        assert wire.run(Ping(1))[0] == READY, "its own connection stays"
