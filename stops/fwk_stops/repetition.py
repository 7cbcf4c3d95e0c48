"""Texts that say the same again and again, found as they come."""

from __future__ import annotations

from collections import deque
from typing import Protocol

FOUND = "repetition_detected"
"""The stop reason of a text that repeats itself: vLLM's."""


class Repetitions(Protocol):
    """Which are looked for: so many times in a row the same tokens, so many of them."""

    @property
    def min_pattern_size(self) -> int: ...
    @property
    def max_pattern_size(self) -> int: ...
    @property
    def min_count(self) -> int: ...


class RepetitionSearch:
    """For each size of a pattern counts how many tokens in a row are the one that came so many before them.

    A pattern of ``size`` tokens stands ``min_count`` times in a row once ``size * (min_count - 1)`` tokens repeat.
    """

    def __init__(self, settings: Repetitions) -> None:
        self._least, self._times = settings.min_pattern_size, settings.min_count - 1
        self._sizes = range(self._least, settings.max_pattern_size + 1)
        self._last: deque[int] = deque(maxlen=settings.max_pattern_size)  # the newest first
        self._runs = [0] * len(self._sizes)

    def feed(self, token_id: int) -> bool:
        """Whether the text repeats itself now."""
        is_found = False
        for i, size in enumerate(self._sizes):
            if size > len(self._last):
                break
            self._runs[i] = self._runs[i] + 1 if self._last[size - 1] == token_id else 0
            is_found = is_found or self._runs[i] >= size * self._times
        self._last.appendleft(token_id)
        return is_found
