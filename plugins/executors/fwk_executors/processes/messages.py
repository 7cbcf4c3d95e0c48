"""What the engine and a rank's process say to each other: msgpack in frames, over a pair of sockets without a name.

Between machines the same goes over TCP, each frame with a tag (``Seal``; the connection's beginning is in ``wire``).
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from fwk.interfaces.executor import WorkerInfo, WorkerRecipe
from fwk.types import Batch, StepResult
from fwk_executors._common.answers import Failed
from fwk_executors._common.torch_group import NetworkStore


class Start(msgspec.Struct, tag=True, frozen=True):
    """Who you are. Answered by ``Loaded``. ``store``: the file, or the address, where the ranks find each other.

    ``recipe``: of the worker; None on another machine, where the rank has it from its own node. ``num_stages``: that
    the ``size`` ranks share evenly.
    """

    number: int
    rank: int
    size: int
    num_stages: int
    local_rank: int
    local_size: int
    store: str | NetworkStore
    recipe: WorkerRecipe | None


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
    """A step's outcome; the last stage's ranks agree on it, so only the first of them sends more than its digest."""

    number: int
    digest: int
    result: StepResult | None


class Called(msgspec.Struct, tag=True, frozen=True):
    number: int
    result: Any


class Join(msgspec.Struct, tag=True, frozen=True):
    """A node's first message to node 0, with what it must have in common with it. Answered by ``Welcome``, or by
    ``Goodbye``."""

    node_rank: int
    common: dict[str, str]


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """All nodes are there: connect your ranks, each with ``Attach`` and this word."""

    session: str


class Attach(msgspec.Struct, tag=True, frozen=True):
    """The only message of a connection before it is handed to the process of a rank."""

    session: str
    rank: int


class Trouble(msgspec.Struct, tag=True, frozen=True):
    """A node is about to end, or the process of one of its ranks has. ``rank``: None for the node."""

    what: str
    rank: int | None = None


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """The engine has ended. ``exit_code``: that of the node, with a sentence if it is not 0; None: join the next."""

    why: str
    exit_code: int | None


ToRank = Start | Run | Call
ToLeader = Join | Attach | Trouble
FromLeader = Welcome | Goodbye
FromRank = Loaded | Ran | Called | Failed

MAX_SEALED_BYTES = 1 << 30
"""Of a frame from another machine; longer ones end the connection."""

_HEAD = struct.Struct("<Q")
_CHUNK = 1 << 20
_TAG_BYTES = 16
_ENCODER = msgspec.msgpack.Encoder()

Message = TypeVar("Message")


class Seal(msgspec.Struct):
    """Signs the frames of one direction of a connection, or checks them. ``count``: those so far."""

    key: bytes
    count: int = 0

    def tag(self, body: bytes) -> bytes:
        """Of the next frame."""
        self.count += 1
        number = _HEAD.pack(self.count)
        return hashlib.blake2b(number + body, key=self.key, digest_size=_TAG_BYTES).digest()


class Placement(msgspec.Struct, frozen=True):
    """What a node tells the process of one of its ranks: its worker, and how its connection's frames are signed."""

    recipe: WorkerRecipe
    sending: Seal
    receiving: Seal


def encode(message: ToRank | FromRank | ToLeader | FromLeader | Placement) -> bytes:
    return _ENCODER.encode(message)


def frame(body: bytes, seal: Seal | None = None) -> bytes:
    """An encoded message as it goes over the wire: its length, its tag if it is signed, and itself."""
    return _HEAD.pack(len(body)) + (b"" if seal is None else seal.tag(body)) + body


class Frames(Generic[Message]):
    """Takes a socket's bytes apart into messages of a kind, and checks their tags if there is a ``seal``."""

    def __init__(self, connection: socket.socket, kind: Any, seal: Seal | None = None) -> None:
        self._connection = connection
        self._seal = seal
        self.why_gone = "closed its connection"
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._bytes = bytearray()

    def receive(self) -> list[Message] | None:
        """Wait for bytes; the messages they complete, perhaps none. None when the other side is gone, or sends what
        is not its own."""
        try:
            data = self._connection.recv(_CHUNK)
        except OSError as error:  # reset, timed out, or closed by ourselves
            self.why_gone = f"is lost ({error.strerror or error})"
            return None
        if not data:
            return None
        self._bytes += data
        try:
            return list(self._complete())
        except _NotTheirs:
            self.why_gone = "sent what is not its own"
            return None

    def _complete(self) -> Iterator[Message]:
        begin = _HEAD.size + (0 if self._seal is None else _TAG_BYTES)
        while len(self._bytes) >= begin:
            length = _HEAD.unpack_from(self._bytes)[0]
            if self._seal is not None and length > MAX_SEALED_BYTES:
                raise _NotTheirs
            end = begin + length
            if len(self._bytes) < end:
                return
            tag, body = bytes(self._bytes[_HEAD.size : begin]), bytes(memoryview(self._bytes)[begin:end])
            del self._bytes[:end]
            if self._seal is not None and not hmac.compare_digest(tag, self._seal.tag(body)):
                raise _NotTheirs
            try:
                message = self._decoder.decode(body)
            except msgspec.MsgspecError:
                if self._seal is None:
                    raise
                raise _NotTheirs from None
            yield message


class _NotTheirs(Exception):
    """A frame that is too long, whose tag is wrong, or that is no message."""
