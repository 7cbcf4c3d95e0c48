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

FALL = 0.5
"""As ``NEWS``, of one below what was expected by as much: steps are held up, and never hurried."""

FEW = 32
"""Tokens of prompts up to which a step tells what the first of them cost."""

FIRST = 4
"""So many of those say too much, in a process that is new to its work."""


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

        num_soon: sequences that would if all prompts were computed. A plain step is one of these, and each prompt that
        is under way or waits has as much room: while a batch fills, small steps would only keep it small.
        """
        if self._most is None or not num_decoding or not self._plain or not self._prompts.slope:
            return budget
        slope, start = self._prompts.slope, self._prompts.start
        num_prompts = max(num_soon - num_decoding, 1)
        tokens = num_prompts * ((self._most - 1) * self._nearest(max(num_decoding, num_soon)) - start) / slope
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
    """The line through two points (x, y): the mean of few tokens, and that of many; ``start`` and ``slope``.

    Of each the newest count most. Two kinds are kept apart as neither tells of the other: a line through all of them
    would follow the first steps of a process, ten times as slow and about as long for any prompt, for hundreds more.
    """

    def __init__(self) -> None:
        self.start: float = 0.0
        self.slope: float = 0.0
        self._few = Mean()
        self._many = Mean()

    def add(self, x: float, y: float) -> None:
        few, many = self._few, self._many
        (few if x <= FEW else many).add(x, y)
        if many.count and few.count < FIRST:
            few = many
        elif not many.count:
            many = few
        self.slope, self.start = many.y / many.x, 0.0
        if few is not many:
            self.slope = min(max((many.y - few.y) / (many.x - few.x), self.slope / 8), few.y / few.x)
            self.start = few.y - self.slope * few.x


class Mean:
    """Of points, the newest of which count most."""

    def __init__(self) -> None:
        self.count: int = 0
        self.x: float = 0.0
        self.y: float = 0.0

    def add(self, x: float, y: float) -> None:
        """A point of another x is expected at a y that is in proportion, or the same."""
        self.count += 1
        if not self.y:  # the first, or one that took no longer than a plain step
            self.x, self.y = x, y
            return
        ratio = x / self.x
        news = FALL if y < min(ratio, 1) * self.y / OUTLIER else NEWS
        y = min(y, max(ratio, 1) * self.y * OUTLIER)
        self.x, self.y = (1 - news) * self.x + news * x, (1 - news) * self.y + news * y
