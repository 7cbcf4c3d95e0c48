"""Thinking between ``<mine>`` and ``</mine>`` at the beginning of an answer."""

from __future__ import annotations

from fwk.interfaces.parser import Parsed, ParserContext, StreamParser

OPEN, CLOSE = "<mine>", "</mine>"


class MineReasoningParser(StreamParser):
    """Three states: nothing known yet, thinking, answering."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._held = ""
        self._is_thinking = context.prompt_tail.endswith(OPEN)
        self._is_answering = False

    def feed(self, text: str) -> Parsed:
        self._held += text
        if not self._is_thinking and not self._is_answering:
            if len(self._held) < len(OPEN) and OPEN.startswith(self._held):
                return Parsed()
            self._is_thinking = self._held.startswith(OPEN)
            self._is_answering = not self._is_thinking
            self._held = self._held.removeprefix(OPEN)
        if self._is_answering:
            held, self._held = self._held, ""
            return Parsed(held)
        thought, mark, answer = self._held.partition(CLOSE)
        if mark:
            self._is_thinking, self._is_answering, self._held = False, True, ""
            return Parsed(answer, thought)
        keep = next((n for n in range(len(CLOSE) - 1, 0, -1) if self._held.endswith(CLOSE[:n])), 0)
        cut = len(self._held) - keep
        thought, self._held = self._held[:cut], self._held[cut:]
        return Parsed(reasoning=thought)

    def finish(self) -> Parsed:
        held, self._held = self._held, ""
        return Parsed(reasoning=held) if self._is_thinking else Parsed(held)
