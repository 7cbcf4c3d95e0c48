"""Whether a head's drafts are worth their time on a CPU, where every row and every pass is work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fwk.interfaces.speculative import Verified

NEEDED_ALONE, NEEDED_MORE = 0.74, 0.83
"""Accepted drafts a check that pay for a step with drafts: for one sequence, and so many more for ``MANY`` at once.

EAGLE-3 on SmolLM2-135M: 0.80 of the tokens with 0.39 accepted a check, and 0.54 at 32 at once
(benchmarks/results/2026-11-24-drafts.md): a step takes 1.74 and 2.57 times as long as one without.
"""

MANY = 32
CHECKS = 6
"""Verifications after which a sequence is judged."""

TRIES = 16
"""Where the sequences before it did not pay, one of so many tries all the same."""

MEMORY = 0.75
"""What an earlier sequence counts for after each further one."""


class Payoff:
    """Turns drafting off, for as long as a sequence lasts, where too little is accepted.

    It has to be for good: while a sequence does not draft, its head computes nothing of it, which is half of the cost.
    """

    def __init__(self, num_slots: int, *, is_on: bool) -> None:
        """is_on: whether anything may be turned off."""
        self._is_on = is_on
        self._kept = np.zeros(num_slots)
        self._checks = np.zeros(num_slots)
        self._is_off = np.zeros(num_slots, bool)
        self._mean: float | None = None  # accepted a check, of the sequences that were judged
        self._needed = NEEDED_ALONE
        self._num_begun = 0

    def is_off(self, slots: np.ndarray) -> np.ndarray:
        """Of which of these nothing is drafted: [n] bool."""
        return self._is_off[slots]

    def observe(self, verified: Verified) -> None:
        """Learn from a step's drafts."""
        if not self._is_on or not len(verified.slots):
            return
        count = min(len(verified.slots), MANY)
        self._needed = NEEDED_ALONE + NEEDED_MORE * (count - 1) / (MANY - 1)
        tried = verified.num_drafts > 0
        slots = verified.slots[tried]
        self._kept[slots] += verified.num_accepted[tried]
        self._checks[slots] += 1
        for slot in slots[self._checks[slots] == CHECKS].tolist():
            accepted = float(self._kept[slot]) / CHECKS
            self._mean = accepted if self._mean is None else MEMORY * self._mean + (1 - MEMORY) * accepted
        judged = slots[self._checks[slots] >= CHECKS]
        self._is_off[judged] |= self._kept[judged] < self._needed * self._checks[judged]

    def reset(self, slots: Sequence[int]) -> None:
        """Other sequences take these slots."""
        for slot in slots:
            self._kept[slot] = self._checks[slot] = 0
            self._num_begun += 1
            pays = self._mean is None or self._mean >= self._needed
            self._is_off[slot] = not pays and self._num_begun % TRIES != 0
