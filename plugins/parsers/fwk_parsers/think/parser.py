"""Splits thinking from the answer."""

from __future__ import annotations

from enum import Enum, auto

from fwk.interfaces.parser import Parsed, ParserContext
from fwk_parsers._common import HeldSpace, SteppingParser, held_len

OPEN, CLOSE = "<think>", "</think>"


class _At(Enum):
    START = auto()  # nothing but white space has come; an opening mark may follow
    OPENED = auto()  # the prompt opened the thinking; the model may do so again
    THINKING = auto()
    THOUGHT = auto()  # behind the closing mark, before the answer's first character
    ANSWER = auto()


class ThinkParser(SteppingParser):
    """White space beside the marks is dropped; thinking that never ends is thinking."""

    is_open_unless_closed = False

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        tail = context.prompt_tail.rstrip()
        is_open = tail.endswith(OPEN) or (self.is_open_unless_closed and not tail.endswith(CLOSE))
        self._at = _At.OPENED if is_open else _At.START
        self._text = ""  # undecided
        self._space = HeldSpace()
        self._has_thought = False

    def finish(self) -> Parsed:
        text, self._text = self._text, ""
        match self._at:
            case _At.THINKING:
                return self._thought(text)
            case _At.START:
                return Parsed(content=self._space.take() + text)
            case _At.OPENED:
                return Parsed(reasoning=text.lstrip())
            case _:
                return Parsed()

    def _step(self) -> Parsed:
        if self._at is _At.ANSWER:
            text, self._text = self._text, ""
            return Parsed(content=text)
        if self._at is _At.THINKING:
            return self._think()
        stripped = self._text.lstrip()
        if not stripped:
            if self._at is _At.START:
                self._space.add(self._text)
            self._text = ""
        elif self._at is _At.THOUGHT:
            self._text, self._at = stripped, _At.ANSWER
        elif stripped.startswith(OPEN):
            self._space.take()
            self._text, self._at = stripped[len(OPEN) :], _At.THINKING
        elif not OPEN.startswith(stripped):
            if self._at is _At.OPENED:
                self._at = _At.THINKING
            else:
                self._text, self._at = self._space.take() + self._text, _At.ANSWER
        return Parsed()

    def _think(self) -> Parsed:
        end = self._text.find(CLOSE)
        if end < 0:
            length = len(self._text) - held_len(self._text, CLOSE)
            sure, self._text = self._text[:length], self._text[length:]
            return self._thought(sure)
        parsed = self._thought(self._text[:end])
        self._text, self._at = self._text[end + len(CLOSE) :], _At.THOUGHT
        return parsed

    def _thought(self, text: str) -> Parsed:
        """Thinking, without the white space around all of it."""
        if not self._has_thought:
            text = text.lstrip()
            self._has_thought = bool(text)
        return Parsed(reasoning=self._space.add(text) if text else "")


class AlwaysThinks(ThinkParser):
    """Thinking comes first, whether or not it was opened."""

    is_open_unless_closed = True
