"""How many tokens of prompts a step takes while sequences decode, so that none waits long for its next token."""

from __future__ import annotations

import math

FEWEST = 8
"""Tokens of prompts that a step has room for in any case: a prompt ends, however slow the machine."""

MULTIPLE = 4
"""Tokens are rounded down to this: kernels compute as many rows at once, or more."""

NEWS = 0.1
"""The share of a new measurement in what is expected from then on."""

OUTLIER = 2.0
"""A measurement counts as at most so many times what was expected."""


class Pace:
    """Learns from each step what a plain one takes, and what prompts add to it: some seconds, and some for each token.

    This is the bound on stalls of Sarathi-Serve (Agrawal et al., OSDI 2024, section 4.2), with the budget of tokens
    measured while serving. most: a step with prompts takes at most so many times a plain one; None: no bound.
    """

    def __init__(self, most: float | None) -> None:
        self._most = most
        self._plain: dict[int, float] = {}  # seconds, by the binary length of the number of sequences
        self._prompts = Line()

    def room(self, num_decoding: int, budget: int, num_soon: int = 0) -> int:
        """Tokens of prompts, of ``budget``, for a step in which ``num_decoding`` sequences decode.

        num_soon: sequences that would if all prompts were computed. A plain step is one of these: while a batch fills,
        small steps would only keep it small.
        """
        if self._most is None or not num_decoding or not self._plain or not self._prompts.slope:
            return budget
        slope, start = self._prompts.slope, self._prompts.start
        tokens = ((self._most - 1) * self._nearest(max(num_decoding, num_soon)) - start) / slope
        # What a step takes more as soon as it has prompts is at most a third of what they add: else throughput suffers.
        return min(budget, max(FEWEST, math.floor(max(tokens, 2 * start / slope)) // MULTIPLE * MULTIPLE))

    def took(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step of so many took ``seconds`` in the worker."""
        if self._most is None or seconds <= 0:
            return
        if num_prompt_tokens:
            self._prompts.add(num_prompt_tokens, max(seconds - self._nearest(num_decoding), 0.0))
            return
        size = num_decoding.bit_length()
        expected = self._plain.get(size, seconds)
        self._plain[size] = (1 - NEWS) * expected + NEWS * min(seconds, OUTLIER * expected)

    def _nearest(self, num_decoding: int) -> float:
        """Seconds of a plain step of so many, or of the batch that is nearest to it of those that were seen."""
        size = num_decoding.bit_length()
        return self._plain[min(self._plain, key=lambda known: abs(known - size))] if self._plain else 0.0


class Line:
    """The line through points (x, y), the newest of which count most: ``start`` and ``slope``, neither below 0."""

    def __init__(self) -> None:
        self.start: float = 0.0
        self.slope: float = 0.0
        self._means: tuple[float, ...] = ()  # of x, y, x * x and x * y

    def add(self, x: float, y: float) -> None:
        if not self.slope:
            self._means = x, y, x * x, x * y
            self.slope = y / x
            return
        y = min(y, OUTLIER * (self.start + self.slope * x))
        news = x, y, x * x, x * y
        self._means = tuple((1 - NEWS) * old + NEWS * new for old, new in zip(self._means, news, strict=True))
        mean_x, mean_y, mean_xx, mean_xy = self._means
        variance = mean_xx - mean_x**2
        if variance > FEWEST:  # else all are about as long, and tell nothing of another length
            self.slope = max((mean_xy - mean_x * mean_y) / variance, mean_y / mean_x / 8)
        self.slope = min(self.slope, mean_y / mean_x)
        self.start = mean_y - self.slope * mean_x
