"""What the engine and a rank's process say to each other: msgpack in frames, over a pair of sockets without a name."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from fwk.interfaces.executor import WorkerInfo, WorkerRecipe
from fwk.types import Batch, StepResult


class Start(msgspec.Struct, tag=True, frozen=True):
    """Who you are. Answered by ``Loaded``. ``store``: the file through which the ranks find each other."""

    number: int
    rank: int
    size: int
    store: str
    recipe: WorkerRecipe


class Run(msgspec.Struct, tag=True, frozen=True):
    """Run a step. Answered by ``Ran``."""

    number: int
    batch: Batch


class Call(msgspec.Struct, tag=True, frozen=True):
    """Run an operation. Answered by ``Called``."""

    number: int
    name: str
    arguments: list[Any]


class Loaded(msgspec.Struct, tag=True, frozen=True):
    number: int
    info: WorkerInfo


class Ran(msgspec.Struct, tag=True, frozen=True):
    """A step's outcome; the ranks agree on it, so only rank 0 sends more than its digest."""

    number: int
    digest: int
    result: StepResult | None


class Called(msgspec.Struct, tag=True, frozen=True):
    number: int
    result: Any


class Failed(msgspec.Struct, tag=True, frozen=True):
    """In place of any answer. ``kind``: the exception's class, one of ``fwk.errors`` if it ``is_refusal``."""

    number: int
    kind: str
    message: str
    is_refusal: bool
    story: str


ToRank = Start | Run | Call
FromRank = Loaded | Ran | Called | Failed

_HEAD = struct.Struct("<Q")
_CHUNK = 1 << 20
_ENCODER = msgspec.msgpack.Encoder()

Message = TypeVar("Message")


def frame(message: ToRank | FromRank) -> bytes:
    """A message as it goes over the wire: its length, and itself."""
    body = _ENCODER.encode(message)
    return _HEAD.pack(len(body)) + body


class Frames(Generic[Message]):
    """Takes a socket's bytes apart into messages of a kind."""

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._connection = connection
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._bytes = bytearray()

    def receive(self) -> list[Message] | None:
        """Wait for bytes; the messages they complete, perhaps none. None when the other side is gone."""
        try:
            data = self._connection.recv(_CHUNK)
        except OSError:  # reset, or closed by ourselves
            return None
        if not data:
            return None
        self._bytes += data
        return list(self._complete())

    def _complete(self) -> Iterator[Message]:
        while len(self._bytes) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_HEAD.size : end])
            del self._bytes[:end]
            yield self._decoder.decode(body)
