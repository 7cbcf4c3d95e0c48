"""Where the end of a sequence stood in text before."""

from __future__ import annotations

import numpy as np

MAX_PLACES = 1024
"""Most places of a match that are counted: the newest."""


def longest_match(text: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, int]:
    """Places right after the longest match of a suffix of ``end`` [matched] in ``text`` [length], and its length.

    At most ``MAX_PLACES``, oldest first. A match that ends with the text is none: nothing follows it.
    """
    last = len(text) - 1
    if last < 1 or not len(end):
        return np.zeros(0, np.int64), 0
    return longer_matches(text, end, np.flatnonzero(text[:last] == end[-1]), 1)


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
