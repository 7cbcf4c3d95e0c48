"""What the server and a process that encodes say to each other: JSON, with its length before it."""

from __future__ import annotations

import msgspec

from fwk.interfaces.executor import WorkerRecipe

MAX_MESSAGE = 64 * 2**20


class Start(msgspec.Struct, frozen=True):
    """The first message. niceness: added to the process's own."""

    recipe: WorkerRecipe
    feature: str
    niceness: int


class Encode(msgspec.Struct, frozen=True):
    """Pieces of one kind: of each the payload, the number in it, its tokens, and the file for its rows."""

    kind: str
    pieces: list[tuple[str, int, int, str]]


class Answer(msgspec.Struct, frozen=True):
    """To each message: why it was not done; empty: it was."""

    error: str = ""


def framed(message: msgspec.Struct) -> bytes:
    """As it is sent."""
    body = msgspec.json.encode(message)
    return len(body).to_bytes(4, "little") + body


def size_of(head: bytes) -> int:
    """Bytes of the message behind it. Raises ``ValueError`` for what is none."""
    size = int.from_bytes(head, "little")
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return size
