"""What the engine's loop takes from its client, message by message, without a process around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from fwk import SamplingParams
from fwk.engine.loop import EngineLoop, bind
from fwk.types import AddRequest, EngineFailed, EngineReady, EngineStats, FromEngine, Ping, Pong, Request, Shutdown

CLIENT = b"the-client"
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
        address = f"ipc://{folder}/s"
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
