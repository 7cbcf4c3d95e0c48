"""Whether a chain's rows are worth their work, for decoders whose drafts are looked up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fwk.interfaces.speculative import DraftView, Verified

FREE_ROWS = 8
"""Rows of a step whose arithmetic takes a CPU as long as reading the weights (SmolLM2-135M: 4 to 10)."""

FEW = 4
"""Sequences up to which rows are as good as free."""

PAUSE = 8
"""Steps between two look-ups for a sequence whose drafts do not pay."""

MEMORY = 0.75
"""What an earlier outcome counts for after each further one."""


class Worth:
    """Cuts chains to the tokens that are accepted often enough for what their rows cost.

    With n sequences in a step, a row more costs n / (n + FREE_ROWS) of what a token costs without drafts, so a draft
    pays that is accepted with at least this probability. It is estimated for each sequence from its own drafts. Of one
    whose drafts do not pay, drafts are looked up all the same, now and then, and compared with what the model writes:
    that takes no row, and shows when they would pay again.
    """

    def __init__(self, num_slots: int, most: int, *, is_on: bool) -> None:
        """is_on: rows cost something, and decoders may draft less than they are asked to."""
        self._most, self._is_on = most, is_on
        self._kept = np.zeros(num_slots)
        self._tried = np.zeros(num_slots)
        self._pauses = np.zeros(num_slots, np.int64)
        self._watched: dict[int, tuple[int, list[int]]] = {}  # by slot: place of the first token, drafts not verified
        self._looks: set[int] = set()

    def observe(self, verified: Verified) -> None:
        """Learn from a step's drafts."""
        if not self._is_on:
            return
        for slot, drafted, kept in zip(
            verified.slots.tolist(), verified.num_drafts.tolist(), verified.num_accepted.tolist(), strict=True
        ):
            if drafted:
                self._learn(slot, kept, kept < drafted)

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing is known of new sequences."""
        self._kept[list(slots)] = self._tried[list(slots)] = self._pauses[list(slots)] = 0
        for slot in slots:
            self._watched.pop(slot, None)

    def counts(self, view: DraftView, most: np.ndarray) -> np.ndarray:
        """Tokens to look up for each sequence of the step that is begun, of at most ``most``: [num_seqs] int64."""
        self._looks = set()
        if not self._is_on or len(view.slots) <= FEW:
            return most
        slots = view.slots
        needed = len(slots) / (len(slots) + FREE_ROWS)
        accepted = (self._kept[slots] + 0.5) / (self._tried[slots] + 1)
        worth = np.floor(np.log(needed) / np.log(np.minimum(accepted, 0.99))).astype(np.int64)
        counts = np.minimum(most, worth)
        for i in np.flatnonzero(worth == 0).tolist():
            slot = int(slots[i])
            self._compare(slot, view.token_ids[slot, : view.num_tokens[i]])
            if slot in self._watched:
                continue
            self._pauses[slot] -= 1
            if self._pauses[slot] < 0:
                self._looks.add(slot)
                self._pauses[slot] = PAUSE - 1
                counts[i] = self._most
        return counts

    def kept(self, view: DraftView, drafts: list[list[int]]) -> list[list[int]]:
        """The drafts without those that are only watched."""
        if not self._looks:
            return drafts
        left: list[list[int]] = []
        for slot, length, tokens in zip(view.slots.tolist(), view.num_tokens.tolist(), drafts, strict=True):
            if slot in self._looks and tokens:
                self._watched[slot] = (length, tokens)
            left.append([] if slot in self._looks else tokens)
        return left

    def _compare(self, slot: int, tokens: np.ndarray) -> None:
        """Learn from watched drafts once they are all written, or another token is. tokens: of the sequence."""
        if slot not in self._watched:
            return
        place, drafts = self._watched[slot]
        written = tokens[place : place + len(drafts)].tolist()
        same = next(
            (i for i, pair in enumerate(zip(written, drafts, strict=False)) if pair[0] != pair[1]), len(written)
        )
        if same < len(written) or len(written) == len(drafts):
            del self._watched[slot]
            self._learn(slot, same, same < len(drafts))
            if same == len(drafts):
                self._pauses[slot] = 0

    def _learn(self, slot: int, kept: int, is_wrong: bool) -> None:
        self._kept[slot] = MEMORY * self._kept[slot] + kept
        self._tried[slot] = MEMORY * self._tried[slot] + kept + is_wrong
