"""Splits thinking from the answer."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import ClassVar

from fwk.interfaces.parser import Parsed, ParserContext, ThinkingMarks
from fwk_parsers._common import HeldSpace, SteppingParser, held_len

OPEN, CLOSE = "<think>", "</think>"
MAX_HELD = 256
"""Of an answer's white space, held back because a closing mark may follow."""


class _At(Enum):
    START = auto()  # nothing but white space has come; an opening mark may follow
    OPENED = auto()  # the prompt opened the thinking; the model may do so again
    THINKING = auto()
    THOUGHT = auto()  # behind the closing mark, before the answer's first character
    ANSWER = auto()


class ThinkParser(SteppingParser):
    """White space alongside the marks is dropped; thinking that never ends is thinking."""

    opens: ClassVar[tuple[str, ...]] = (OPEN,)
    closes: ClassVar[tuple[str, ...]] = (CLOSE,)
    interrupts: ClassVar[tuple[str, ...]] = ()
    """Marks of tool calls that end the thinking as well; they belong to the answer."""
    is_open_unless_closed: ClassVar[bool] = False

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        tail = context.prompt_tail.rstrip()
        is_open = tail.endswith(self.opens) or (self.is_open_unless_closed and not tail.endswith(self.closes))
        self._at = _At.OPENED if is_open else _At.START
        self._text = ""  # undecided
        self._space = HeldSpace()
        self._has_thought = False
        self._ends = (*self.closes, *self.interrupts)
        self._end = re.compile("|".join(map(re.escape, self._ends)))

    def thinking_marks(self) -> ThinkingMarks:
        opens = "" if self._at is _At.OPENED else self.opens[0]
        return ThinkingMarks(opens, self._ends, f"{self.closes[0]}\n\n")

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
        elif (mark := next((mark for mark in self.opens if stripped.startswith(mark)), None)) is not None:
            self._space.take()
            self._text, self._at = stripped[len(mark) :], _At.THINKING
        elif not any(mark.startswith(stripped) for mark in self.opens):
            if self._at is _At.OPENED:
                self._at = _At.THINKING
            else:
                self._text, self._at = self._space.take() + self._text, _At.ANSWER
        return Parsed()

    def _think(self) -> Parsed:
        found = self._end.search(self._text)
        if found is None:
            length = len(self._text) - max(held_len(self._text, mark) for mark in self._ends)
            sure, self._text = self._text[:length], self._text[length:]
            return self._thought(sure)
        parsed = self._thought(self._text[: found.start()])
        is_mark = found.group() in self.closes
        self._text, self._at = self._text[found.end() if is_mark else found.start() :], _At.THOUGHT
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


class KimiThinks(ThinkParser):
    """Kimi K2 Thinking goes over to tool calls without closing its thinking."""

    reads_special = True
    interrupts = ("<|tool_calls_section_begin|>",)


class KimiVisionThinks(ThinkParser):
    """Kimi-VL Thinking and K1.5."""

    reads_special = True
    opens = ("◁think▷",)
    closes = ("◁/think▷",)


class MistralThinks(ThinkParser):
    """Magistral: special tokens from 2507 on, ``<think>`` as text before."""

    reads_special = True
    opens = ("[THINK]", OPEN)
    closes = ("[/THINK]", CLOSE)


class MarkedAnswer(ThinkParser):
    """Marks around the answer, too, which are dropped: one before its first character, one at the very end of it."""

    answer_open: ClassVar[str] = "<answer>"
    answer_close: ClassVar[str] = "</answer>"

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._held = ""  # of the answer: what may be a mark
        self._is_marked: bool | None = None  # None: not known yet
        self._has_answered = False

    def feed(self, text: str) -> Parsed:
        parsed = super().feed(text)
        return Parsed(self._answer(parsed.content), parsed.reasoning)

    def finish(self) -> Parsed:
        parsed = super().finish()
        content = self._answer(parsed.content)
        held, self._held = self._held, ""
        return Parsed(content + (held if held.strip() != self.answer_close else ""), parsed.reasoning)

    def _answer(self, text: str) -> str:
        """What is sure to be the answer."""
        self._held += text
        if self._is_marked is None:
            stripped = self._held.lstrip()
            if stripped.startswith(self.answer_open):
                self._is_marked, self._held = True, stripped[len(self.answer_open) :]
            elif self.answer_open.startswith(stripped):
                return ""
            else:
                self._is_marked = False
        if not self._is_marked:
            out, self._held = self._held, ""
            return out
        if self._is_marked and not self._has_answered:
            self._held = self._held.lstrip()
            self._has_answered = bool(self._held)
        return self._before_end()

    def _before_end(self) -> str:
        """All but an end that may be the closing mark and white space around it."""
        end = self._held.rfind(self.answer_close)
        if end < 0 or self._held[end + len(self.answer_close) :].strip():
            body = self._held.rstrip()
            length = len(body) - held_len(body, self.answer_close)
            end = length if length < len(body) else len(body)
        length = len(self._held[:end].rstrip())
        if len(self._held) - length > MAX_HELD:
            length = end
        out, self._held = self._held[:length], self._held[length:]
        return out


class GraniteThinks(MarkedAnswer):
    """Granite 3.2 says in words what is what; 3.3 has marks, and others around the answer."""

    opens = ("Here is my thought process:", "Here's my thought process:", OPEN)
    closes = ("Here is my response:", "Here's my response:", CLOSE)
    answer_open, answer_close = "<response>", "</response>"


class HunyuanThinks(MarkedAnswer):
    """Hunyuan-A13B."""
