"""What plugins of this family share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from fwk.interfaces.parser import Parsed, StreamParser


class SteppingParser(StreamParser):
    """A parser that is in one state at a time, and goes on as long as a step changes it."""

    _at: Any  # the state, an enum
    _text: str  # undecided

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while True:
            before = self._at
            parsed += self._step()
            if self._at is before:
                return parsed

    @abstractmethod
    def _step(self) -> Parsed:
        """Decide on the text as far as it goes in one state."""


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
