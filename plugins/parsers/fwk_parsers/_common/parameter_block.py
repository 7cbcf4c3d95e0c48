"""The end of a call whose arguments stand between marks, and the arguments in it."""

from __future__ import annotations

import re
from collections.abc import Collection

from fwk_parsers._common import held_len

MAX_BEGINNING = 512
"""Characters of an argument's beginning, its name among them."""

MAX_SPACE = 64
"""White space behind an argument within which the next mark is recognised."""

_SPACE = re.compile(rf"\s{{0,{MAX_SPACE}}}")


class ParameterBlock:
    """Knows the marks of the call from those in an argument's value.

    A value ends at a closing mark that is followed by the next argument or the end of the call, and by nothing else: a
    value may hold any of these marks. ``ends``: part of the call; ``closes``: not.
    """

    def __init__(
        self, begin: str, pattern: re.Pattern[str], end: str, ends: tuple[str, ...], closes: tuple[str, ...]
    ) -> None:
        self.found: list[tuple[re.Match[str], str]] = []  # each argument's beginning and its value
        self._begin, self._pattern, self._end, self._ends = begin, pattern, end, ends
        self._marks = (*ends, *closes)
        self._mark = re.compile("|".join(map(re.escape, self._marks)))
        self._followers = (begin, *self._marks)
        self._open: re.Match[str] | None = None  # the beginning of the argument under way
        self._pieces: list[str] = []  # of its value

    def run(self, text: str) -> tuple[int, bool]:
        place, is_end = 0, None
        while is_end is None:
            place, is_end = self._between(text, place) if self._open is None else self._in_value(text, place)
        return place, is_end

    def _between(self, text: str, place: int) -> tuple[int, bool | None]:
        """Up to the next argument or the call's end. The flag: whether that is it; None: go on."""
        mark = self._mark.search(text, place)
        limit = mark.start() if mark is not None else len(text)
        begin = text.find(self._begin, place, limit)
        if begin >= 0:
            found = self._pattern.match(text, begin, limit)
            if found is not None and found.end() - begin <= MAX_BEGINNING:
                self._open, self._pieces = found, []
                return found.end(), None
            if mark is None and len(text) - begin < MAX_BEGINNING:
                return begin, False
            return begin + len(self._begin), None
        if mark is not None:
            return (mark.end() if mark.group() in self._ends else mark.start()), True
        return max(place, len(text) - _held(text, self._followers)), False

    def _in_value(self, text: str, place: int) -> tuple[int, bool | None]:
        assert self._open is not None
        at = text.find(self._end, place)
        if at < 0:
            stop = max(place, len(text) - held_len(text, self._end))
            self._pieces.append(text[place:stop])
            return stop, False
        self._pieces.append(text[place:at])
        behind = at + len(self._end)
        space = _SPACE.match(text, behind)
        rest = text[space.end() if space is not None else behind :][: max(map(len, self._followers))]
        if rest.startswith(self._followers):
            self.found.append((self._open, "".join(self._pieces)))
            self._open = None
            return behind, None
        if not rest or any(mark.startswith(rest) for mark in self._followers):
            return at, False
        self._pieces.append(self._end)  # part of the value
        return behind, None


def _held(text: str, marks: Collection[str]) -> int:
    return max(held_len(text, mark) for mark in marks)
