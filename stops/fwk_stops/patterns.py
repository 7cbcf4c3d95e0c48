"""Regular expressions that end a text, found in time linear in the text whoever wrote them.

Python's syntax without what needs to look around or back: an automaton carries all positions in the patterns through
the text at once (K. Thompson, "Regular Expression Search Algorithm", CACM 1968), so nothing is tried twice.

Text comes in pieces, and what may begin a match is held back, so a search must keep its state and tell where its oldest
unfinished match begins. No library does both in linear time: google-re2 searches whole texts and reports complete
matches alone, llguidance's matcher is anchored at the start and reads tokens, and ``regex``, whose matches may be
partial, backtracks. ``re._parser`` is private, but it is the only reader of exactly Python's syntax, which users write;
a Python that changes it fails ``tests/core/test_stop_patterns.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

ops: Any = import_module("re._constants")  # what Python's own parser of patterns makes
parser: Any = import_module("re._parser")

MAX_STOP_PATTERNS = 16
MAX_PATTERN_LENGTH = 256
MAX_STATES = 512
MAX_MATCH = 4_096
"""Characters of the longest text that a pattern is looked for in; more are given out."""

Test = Callable[[str], bool]
Threads = dict[int, int]
"""Where the patterns have been followed to: the state, and where in the text that began (counted from the end of the
text so far, so 0 or less)."""

_CLASSES: dict[Any, Test] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    ops.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    ops.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}
_FLAGS = re.UNICODE | re.DOTALL


class StopPatterns:
    """The automaton of a request's patterns. Raises ``ValueError`` for one that is not read."""

    def __init__(self, sources: tuple[str, ...]) -> None:
        self._tests: list[Test | None] = [None]  # None: of a state that is left at once
        self._next: list[list[int]] = [[]]
        self._names: dict[int, str] = {}
        starts = [self._pattern(source) for source in sources]
        self._closures = [self._closure(state) for state in range(len(self._tests))]
        self._starts = sorted({state for start in starts for state in self._closures[start]})

    def feed(self, threads: Threads, text: str) -> tuple[Threads, tuple[int, int, str] | None]:
        """The threads after ``text``, and the match that is complete first: where it begins (negative: before ``text``)
        and ends, and its pattern."""
        for at, c in enumerate(text):
            for state in self._starts:
                threads.setdefault(state, at)
            stepped: Threads = {}
            found: tuple[int, int] | None = None
            for state, begin in threads.items():
                test = self._tests[state]
                if test is None or not test(c):
                    continue
                for after in self._closures[self._next[state][0]]:
                    if self._tests[after] is None:  # an end
                        found = min(found or (begin, after), (begin, after))
                    elif begin < stepped.get(after, at + 1):
                        stepped[after] = begin
            if found is not None:
                return {}, (found[0], at + 1, self._names[found[1]])
            threads = {state: begin for state, begin in stepped.items() if at - begin < MAX_MATCH}
        return {state: begin - len(text) for state, begin in threads.items()}, None

    def _state(self, test: Test | None, after: Sequence[int]) -> int:
        if len(self._tests) >= MAX_STATES:
            raise ValueError("the patterns are too large: repetitions count as often as they are asked for")
        self._tests.append(test)
        self._next.append(list(after))
        return len(self._tests) - 1

    def _pattern(self, source: str) -> int:
        if not 1 <= len(source) <= MAX_PATTERN_LENGTH:
            raise ValueError(f"a pattern has 1 to {MAX_PATTERN_LENGTH} characters")
        try:
            tree = parser.parse(source)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{source!r} is no regular expression: {error}") from None
        if tree.state.flags & ~_FLAGS:
            raise ValueError(f"{source!r}: of the flags only (?s) is read")
        end = self._state(None, ())
        self._names[end] = source
        start = self._sequence(tree, end, bool(tree.state.flags & re.DOTALL))
        if end in self._closure(start):
            raise ValueError(f"{source!r} matches the empty text")
        return start

    def _sequence(self, items: Any, after: int, dots_all: bool) -> int:
        for kind, value in reversed(list(items)):
            after = self._item(kind, value, after, dots_all)
        return after

    def _item(self, kind: Any, value: Any, after: int, dots_all: bool) -> int:
        if kind is ops.BRANCH:
            return self._state(None, [self._sequence(branch, after, dots_all) for branch in value[1]])
        if kind is ops.SUBPATTERN:
            _, adds, drops, items = value
            if adds or drops:
                raise ValueError("flags within a pattern are not read")
            return self._sequence(items, after, dots_all)
        if kind in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, items = value
            return self._repeat(least, most, items, after, dots_all)
        return self._state(_test(kind, value, dots_all), [after])

    def _repeat(self, least: int, most: Any, items: Any, after: int, dots_all: bool) -> int:
        start = after
        if most is ops.MAXREPEAT:
            start = self._state(None, [after])
            self._next[start].insert(0, self._sequence(items, start, dots_all))
        else:
            for _ in range(most - least):
                start = self._state(None, [self._sequence(items, start, dots_all), after])
        for _ in range(least):
            start = self._sequence(items, start, dots_all)
        return start

    def _closure(self, state: int) -> list[int]:
        """The states that wait for a character, and the ends, which are reached without one."""
        found, seen, waiting = [], {state}, [state]
        while waiting:
            at = waiting.pop()
            if self._tests[at] is not None or at in self._names:
                found.append(at)
                continue
            for after in self._next[at]:
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return found


def _test(kind: Any, value: Any, dots_all: bool) -> Test:
    """Whether a character is one that an item of a pattern stands for."""
    if kind is ops.LITERAL:
        return chr(value).__eq__
    if kind is ops.NOT_LITERAL:
        return chr(value).__ne__
    if kind is ops.ANY:
        return (lambda c: True) if dots_all else "\n".__ne__
    if kind is ops.CATEGORY:
        return _CLASSES[value]
    if kind is ops.RANGE:
        low, high = map(chr, value)
        return lambda c: low <= c <= high
    if kind is ops.IN:
        is_negated = value[0][0] is ops.NEGATE
        tests = [_test(item[0], item[1], dots_all) for item in value[is_negated:]]
        return lambda c: any(test(c) for test in tests) != is_negated
    raise ValueError("a pattern may not look back or around, nor refer to a group or to where the text ends")


@lru_cache(maxsize=64)
def stop_patterns(sources: tuple[str, ...]) -> StopPatterns:
    """The automaton of these patterns, at least one; made once for the sequences of a request."""
    if len(sources) > MAX_STOP_PATTERNS:
        raise ValueError(f"at most {MAX_STOP_PATTERNS} patterns, not {len(sources)}")
    return StopPatterns(sources)
