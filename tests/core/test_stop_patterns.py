"""Regular expressions that end a text, against Python's own."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fwk_stops.patterns import StopPatterns, stop_patterns

SOURCES = [
    "ab",
    "a+b",
    "(a|ab)(c|bcd)",
    "[^a-c]x",
    "a{2,3}b",
    "(?:ab)*c",
    r"\d{2}|b\s",
    "a.c",
    "(?s)a.c",
    "x(a|b)?y",
    "[a-c]{3}",
    "a*?b",
]


def first_to_end(source: str, text: str) -> tuple[int, int] | None:
    """The match that ends first, and of those that end there the one that begins first."""
    for end in range(1, len(text) + 1):
        for begin in range(end):
            if re.fullmatch(source, text[begin:end]):
                return begin, end
    return None


def found(source: str, pieces: list[str]) -> tuple[int, int] | None:
    automaton, threads, seen = StopPatterns((source,)), {}, 0
    for piece in pieces:
        threads, match = automaton.feed(threads, piece)
        if match is not None:
            return seen + match[0], seen + match[1]
        seen += len(piece)
        assert all(-seen <= begin < 0 for begin in threads.values())
    return None


@pytest.mark.parametrize("source", SOURCES)
@given(pieces=st.lists(st.text(alphabet="abcdxy1 \n", max_size=6), max_size=5))
def test_the_match_that_is_complete_first_is_found(source: str, pieces: list[str]) -> None:
    assert found(source, pieces) == first_to_end(source, "".join(pieces))


def test_text_that_may_begin_a_match_is_known() -> None:
    automaton = StopPatterns(("ab+c", "xy"))
    threads, match = automaton.feed({}, "zzabb")
    assert match is None
    assert min(threads.values()) == -3
    threads, match = automaton.feed(threads, "d")
    assert (threads, match) == ({}, None)
    assert automaton.feed({}, "axy")[1] == (1, 3, "xy")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("(", "no regular expression"),
        ("a*", "matches the empty text"),
        ("a$", "may not look back"),
        (r"(a)\1", "may not look back"),
        ("(?=a)b", "may not look back"),
        ("(?i)a", r"only \(\?s\) is read"),
        ("(?i:a)", "within a pattern"),
        ("a{1000}", "too large"),
        ("((a{30}){30}){30}", "too large"),
        ("a" * 257, "1 to 256 characters"),
        ("(" * 120 + "a" + ")" * 120, ""),
    ],
)
def test_what_is_not_read_is_refused(source: str, sentence: str) -> None:
    if sentence:
        with pytest.raises(ValueError, match=sentence):
            stop_patterns((source,))
    else:
        assert stop_patterns((source,)).feed({}, "xa")[1] == (1, 2, source)


@pytest.mark.parametrize("source", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*){4}#", "(x+x+)+y"])
def test_the_time_is_linear_in_the_text(source: str) -> None:
    """Each of these keeps a backtracking engine busy for years."""
    automaton = StopPatterns((source,))
    started = time.process_time()
    threads, match = automaton.feed({}, "ax" * 2_000 + "a" * 4_000)
    assert match is None
    assert len(threads) < 100
    assert time.process_time() - started < 5
