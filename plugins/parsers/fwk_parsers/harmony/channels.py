"""Splits the messages of an answer by their channel."""

from __future__ import annotations

import re
from enum import Enum, auto

from fwk.interfaces.parser import Parsed, ParserContext, ThinkingMarks
from fwk_parsers._common import SteppingParser, held_len
from fwk_parsers._common.marked import MAX_HEADER
from fwk_parsers.harmony.tools import CHANNEL, MESSAGE, START, TO_FUNCTION

_ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*([a-z]+)")
_FIRST = (START, CHANNEL, "to=", MESSAGE)
"""What an answer in this format begins with; anything else is text."""


class _At(Enum):
    FIRST = auto()  # before the first message's header
    HEADER = auto()
    BODY = auto()
    BEHIND = auto()  # a message's end


class _To(Enum):
    REASONING = auto()
    CONTENT = auto()
    FUNCTION = auto()  # content with its marks, for the tool parser


class HarmonyChannels(SteppingParser):
    """Analysis is thinking; all other channels are content, without marks but for messages to functions."""

    reads_special = True

    _at: _At

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._text = ""  # undecided
        header = context.prompt_tail.rpartition(START)[2]
        self._at = _At.FIRST
        self._to = _To.CONTENT
        if MESSAGE in header:  # the prompt has begun the message
            self._at, self._to = _At.BODY, _destination(header)

    def thinking_marks(self) -> ThinkingMarks:
        is_open = self._at is _At.BODY and self._to is _To.REASONING
        opens = "" if is_open else f"{CHANNEL}analysis{MESSAGE}"
        return ThinkingMarks(opens, _ENDS, f"{_ENDS[0]}{START}assistant{CHANNEL}final{MESSAGE}")

    def finish(self) -> Parsed:
        text, self._text = self._text, ""
        if self._at is _At.BODY:
            return self._given(text)
        return Parsed(content=text)

    def _step(self) -> Parsed:
        match self._at:
            case _At.FIRST:
                return self._first()
            case _At.HEADER:
                return self._in_header()
            case _At.BODY:
                return self._in_body()
            case _At.BEHIND:
                return self._behind()

    def _first(self) -> Parsed:
        rest = self._text.lstrip()
        if any(rest.startswith(mark) for mark in _FIRST):
            self._at = _At.HEADER
        elif rest and not any(mark.startswith(rest) for mark in _FIRST):
            self._at, self._to = _At.BODY, _To.CONTENT
        return Parsed()

    def _in_header(self) -> Parsed:
        end = self._text.find(MESSAGE, 0, MAX_HEADER)
        if end < 0 and len(self._text) < MAX_HEADER:
            return Parsed()
        self._at = _At.BODY
        if end < 0:  # no header: its mark would begin one again
            mark, self._to = START if self._text.startswith(START) else "", _To.CONTENT
            self._text = self._text[len(mark) :]
            return Parsed(content=mark)
        header, self._text = self._text[: end + len(MESSAGE)], self._text[end + len(MESSAGE) :]
        self._to = _destination(header)
        return Parsed(content=header if self._to is _To.FUNCTION else "")

    def _in_body(self) -> Parsed:
        found = _END.search(self._text)
        if found is None:
            length = len(self._text) - max(held_len(self._text, mark) for mark in _ENDS)
            piece, self._text = self._text[:length], self._text[length:]
            return self._given(piece)
        is_start = found.group() == START  # of the next message, without an end of this one
        piece = self._text[: found.start() if is_start or self._to is not _To.FUNCTION else found.end()]
        parsed = self._given(piece)
        self._text = self._text[found.start() if is_start else found.end() :]
        self._at = _At.HEADER if is_start else _At.BEHIND
        return parsed

    def _behind(self) -> Parsed:
        """Another message, or text that is in none."""
        rest = self._text.lstrip()
        if any(rest.startswith(mark) for mark in (START, CHANNEL)):
            self._text, self._at = rest, _At.HEADER
        elif rest and not any(mark.startswith(rest) for mark in (START, CHANNEL)):
            self._at, self._to = _At.BODY, _To.CONTENT
        return Parsed()

    def _given(self, text: str) -> Parsed:
        return Parsed(reasoning=text) if self._to is _To.REASONING else Parsed(content=text)


def _destination(header: str) -> _To:
    if TO_FUNCTION.search(header) is not None:
        return _To.FUNCTION
    channel = _NAME.search(header)
    return _To.REASONING if channel is not None and channel.group(1) == "analysis" else _To.CONTENT
