"""What the two processes say to each other: messages with their length before them."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

MAX_FRAME = 256 * 2**20

Status = Literal["ok", "refused", "cpu", "memory", "raised", "failed"]


class Job(msgspec.Struct, tag=True, frozen=True):
    """One piece of work. ``max_bytes``: what it may allocate beyond what the process had before.

    ``is_warm_up``: it is prepared for those to come, and need not be done.
    """

    number: int
    kind: str
    body: bytes
    cpu_seconds: float
    max_bytes: int
    is_warm_up: bool = False


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for a job any more."""

    number: int


class Answer(msgspec.Struct, frozen=True):
    """What became of a job: its result, or why there is none."""

    number: int
    status: Status
    value: bytes = b""
    param: str | None = None


def write_frame(descriptor: int, body: bytes) -> None:
    """A message and, before it, its length."""
    data = memoryview(len(body).to_bytes(4, "little") + body)
    while data:
        data = data[os.write(descriptor, data) :]


def read_frame(descriptor: int) -> bytes | None:
    """The next message; None at the end, also in the middle of one."""
    head = _read(descriptor, 4)
    size = int.from_bytes(head or b"", "little")
    return None if head is None or size > MAX_FRAME else _read(descriptor, size)


def _read(descriptor: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
