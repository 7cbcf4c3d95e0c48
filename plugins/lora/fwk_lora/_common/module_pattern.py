"""Patterns of module names as PEFT's configurations have them, matched in linear time whoever wrote them.

Regular expressions without repetitions: literals, ``.``, ``\\.``, ``\\d``, ``\\w``, ``^``, groups and alternatives. A
backtracking engine takes 2 ** n steps for ``(a|a)`` written n times; this one carries a set of positions through the
pattern, so that each of its parts is looked at once for each character of the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

MAX_LENGTH = 1024
MAX_DEPTH = 16
_LITERALS = frozenset("-_")
_CLASSES: dict[str, Callable[[str], bool]] = {"d": str.isdecimal, "w": lambda c: c.isalnum() or c == "_"}

Positions = frozenset[int]
Part = str | list["Sequence"]
"""A character, an escaped one with its backslash, or the alternatives of a group."""

Sequence = list[Part]


class ModulePattern:
    """One pattern. Raises ``ValueError`` for what is not read."""

    def __init__(self, source: str) -> None:
        if not 1 <= len(source) <= MAX_LENGTH:
            raise ValueError(f"a pattern has 1 to {MAX_LENGTH} characters")
        self._source = source
        self._at = 0
        self._alternatives = self._read(0)
        if self._at < len(source):
            raise ValueError("a parenthesis is closed that was not opened")

    def matches(self, name: str) -> bool:
        """Whether it is the whole name, or all of it after one of its dots."""
        starts = frozenset({0, *(i + 1 for i, c in enumerate(name) if c == ".")})
        return len(name) in _group(self._alternatives, name, starts)

    def _read(self, depth: int) -> list[Sequence]:
        """Alternatives up to the end, or to the parenthesis that closes them."""
        if depth > MAX_DEPTH:
            raise ValueError(f"groups are nested deeper than {MAX_DEPTH}")
        alternatives: list[Sequence] = [[]]
        while self._at < len(self._source) and self._source[self._at] != ")":
            c = self._source[self._at]
            self._at += 1
            if c == "|":
                alternatives.append([])
            elif c in "*+?{[":
                raise ValueError("repetitions are not read, nor sets of characters")
            elif c == "(":
                alternatives[-1].append(self._read(depth + 1))
                if self._at == len(self._source):
                    raise ValueError("a parenthesis is not closed")
                self._at += 1
            else:
                alternatives[-1].append(self._single(c))
        return alternatives

    def _single(self, c: str) -> str:
        if c == "\\":
            c = self._source[self._at : self._at + 1]
            self._at += 1
            if not c or (c.isalnum() and c not in _CLASSES):
                raise ValueError(f"\\{c} is not read")
            return "\\" + c
        if not (c.isalnum() or c in _LITERALS or c in ".^"):
            raise ValueError(f"{c!r} is not read")
        return c


_compiled = lru_cache(4096)(ModulePattern)
_PLAIN = re.compile(r"[\w.-]{1,1024}")


def matches(pattern: str, name: str) -> bool:
    """Whether a module of this name is meant. Raises ``ValueError`` for a pattern that is not read.

    One without groups leaves a regular expression no choice, and those are most: a name in full for each module.
    """
    if _PLAIN.fullmatch(pattern):
        return re.fullmatch(rf"(.*\.)?{pattern}", name) is not None
    return _compiled(pattern).matches(name)


def _group(alternatives: list[Sequence], name: str, starts: Positions) -> Positions:
    ends: set[int] = set()
    for sequence in alternatives:
        positions = starts
        for part in sequence:
            if not positions:
                break
            positions = _step(part, name, positions)
        ends |= positions
    return frozenset(ends)


def _step(part: Part, name: str, positions: Positions) -> Positions:
    if isinstance(part, list):
        return _group(part, name, positions)
    if part == "^":
        return positions & {0}
    return frozenset(at + 1 for at in positions if at < len(name) and _is(part, name[at]))


def _is(part: str, c: str) -> bool:
    if part[0] != "\\":
        return part in (".", c)
    return _CLASSES[part[1]](c) if part[1] in _CLASSES else c == part[1]
