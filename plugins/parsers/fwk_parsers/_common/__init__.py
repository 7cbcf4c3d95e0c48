"""What plugins of this family share."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from fwk.interfaces.parser import Parsed, StreamParser

MAX_PIECE = 4096
"""Characters looked at together: a step that cuts the undecided text then costs no more when more is fed at once."""


class SteppingParser(StreamParser):
    """A parser that is in one state at a time, and continues as long as a step changes it."""

    _at: Any  # the state, an enum
    _text: str  # undecided

    def feed(self, text: str) -> Parsed:
        found: list[Parsed] = []
        for start in range(0, len(text), MAX_PIECE):
            self._text += text[start : start + MAX_PIECE]
            before = None
            while self._at is not before:
                before = self._at
                found.append(self._step())
        return joined(found)

    @abstractmethod
    def _step(self) -> Parsed:
        """Decide on the text as far as it goes in one state."""


def joined(pieces: Sequence[Parsed]) -> Parsed:
    """All pieces, in order, as one: linear in their number."""
    calls = [delta for piece in pieces for delta in piece.tool_calls]
    content, reasoning = "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces)
    return Parsed(content, reasoning, calls)


def as_json(value: Any) -> str:
    """As JSON that every reply can hold. Raises ``ValueError`` for numbers that JSON has not."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    return text


def held_len(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that could be the beginning of ``mark``, but is not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


class HeldSpace:
    """Keeps back white space until it is known what follows it."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, text: str) -> str:
        """What may be given out now: ``text`` after all that was held, less the white space at its end."""
        body = text.rstrip()
        if not body:
            self._pieces.append(text)
            return ""
        out = "".join([*self._pieces, body])
        self._pieces = [text[len(body) :]]
        return out

    def take(self) -> str:
        """The white space held, which is not held any more."""
        space, self._pieces = "".join(self._pieces), []
        return space
