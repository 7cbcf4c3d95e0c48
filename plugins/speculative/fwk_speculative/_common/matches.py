"""Where the end of a sequence stood in text before."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np

MAX_PLACES = 1024
"""Most places of a match that are counted: the newest."""

AT_ONCE = 1 << 16
"""Tokens compared at once: more of them leave a core's cache."""


def longest_match(text: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, int]:
    """Places right after the longest match of a suffix of ``end`` [matched] in ``text`` [length], and its length.

    At most ``MAX_PLACES``, oldest first. A match that ends with the text is none: nothing follows it.
    """
    last = len(text) - 1
    if last < 1 or not len(end):
        return np.zeros(0, np.int64), 0
    return longer_matches(text, end, np.flatnonzero(text[:last] == end[-1]), 1)


def newest_matches(
    token_ids: np.ndarray, slots: np.ndarray, lengths: np.ndarray, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each sequence, the newest of the longest matches of its end in its own text: [num_seqs] int64 each.

    token_ids: [num_slots, max_len] int32, of which ``lengths`` [num_seqs] tokens of ``slots`` are text. Returns the
    places right after the matches, and their lengths, at most ``longest``; 0 and 0 where there is none.
    """
    places, matched = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
    width = int(lengths.max(initial=0))
    for begin in range(0, len(slots), max(AT_ONCE // max(width, 1), 1)):
        some = slice(begin, begin + max(AT_ONCE // max(width, 1), 1))
        texts, last = token_ids[slots[some], :width], lengths[some] - 1
        ends = texts[np.arange(len(last)), last]
        rows, at = np.divmod(np.flatnonzero(texts == ends[:, None]), width)
        is_before = at < last[rows]
        rows, at = rows[is_before], at[is_before]
        if not len(rows):
            continue
        depths, left = np.ones(len(rows), np.int64), np.arange(len(rows))
        for depth in range(1, longest):
            left = left[at[left] >= depth]
            left = left[texts[rows[left], at[left] - depth] == texts[rows[left], last[rows[left]] - depth]]
            if not len(left):
                break
            depths[left] += 1
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        found = rows[first]
        best = np.maximum.reduceat(depths * width + at, first)
        places[some][found], matched[some][found] = best % width + 1, best // width
    return places, matched


def longer_matches(text: np.ndarray, end: np.ndarray, found: np.ndarray, matched: int) -> tuple[np.ndarray, int]:
    """``longest_match``, of matches whose last tokens stand at ``found`` and which are known to be ``matched`` long."""
    if not len(found):
        return found, 0
    while matched < len(end):
        longer = found[found >= matched]
        longer = longer[text[longer - matched] == end[-1 - matched]]
        if not len(longer):
            break
        found, matched = longer, matched + 1
    return found[-MAX_PLACES:] + 1, matched


def copied(text: np.ndarray, place: int, count: int) -> list[int]:
    """``count`` tokens as they follow ``place`` in ``text`` [length], and after the text's end what was copied so far.

    As in LZ77 (Ziv and Lempel 1977) a copy may overlap what it makes: of a match n tokens before the end it continues a
    text of period n.
    """
    known: list[int] = text[place : place + count].tolist()
    return known if len(known) == count else list(islice(cycle(known), count))
