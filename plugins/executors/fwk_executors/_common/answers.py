"""What a rank in another process says of its work, whichever way it travels."""

from __future__ import annotations

import zlib

import msgspec

from fwk.errors import one_line_traceback
from fwk.types import StepResult


class Failed(msgspec.Struct, tag=True, frozen=True):
    """In place of any answer. ``kind``: the exception's class, one of ``fwk.errors`` if it ``is_refusal``."""

    number: int
    kind: str
    message: str
    is_refusal: bool
    story: str


def failure(number: int, error: Exception, *, is_refusal: bool) -> Failed:
    """The answer to a job that raised."""
    return Failed(number, type(error).__name__, str(error), is_refusal, one_line_traceback(error))


def digest(result: StepResult) -> int:
    """A number that ranks which chose the same tokens have in common."""
    chosen = [(s.slot, s.token_ids, s.draft_token_ids, s.error is None) for s in result.sequences]
    return zlib.crc32(msgspec.msgpack.encode(chosen))
