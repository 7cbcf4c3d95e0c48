"""Drafts that features' parts know, without a decoder: chains, and certain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fwk.interfaces.drafting import Drafting, DraftingParts, Gain
from fwk.interfaces.speculative import Acceptance
from fwk.interfaces.step import LaunchedStep
from fwk.types import ForwardBatch, ScheduledSequence, SequenceResult
from fwk_speculative.drafting.acceptance import EXACT, count_gained
from fwk_speculative.drafting.notes import StepNotes
from fwk_speculative.drafting.part_drafts import NoPartDrafts
from fwk_speculative.drafting.running_ahead import RunningAhead, ranges, settle_chains
from fwk_speculative.drafting.verify import Verifier


class ChainDrafting(Drafting):
    """Verifies drafts, and puts those of features' parts into results."""

    def __init__(
        self, parts: DraftingParts, of_parts: NoPartDrafts, ahead: RunningAhead, acceptance: Acceptance = EXACT
    ) -> None:
        self.table, self.sampling = parts.table, parts.sampling
        self.ahead = ahead
        self._of_parts = of_parts
        self._verifier = Verifier(parts.table, parts.sampling, parts.inputs.send, self, acceptance)

    def drawn(self, slot: int) -> Tensor | None:
        """``Made.drawn``."""
        return None

    def is_relaxed(self, slot: int) -> bool:
        """``Made.is_relaxed``."""
        return False

    def keep(self, slot: int, path: list[int]) -> None:
        """``Made.keep``."""

    def has_moved(self, slot: int) -> bool:
        """``Made.has_moved``."""
        return bool(self.ahead.slots[slot])

    def parents(self, slot: int) -> list[int] | None:
        """Which of a slot's newest drafts each of them follows; None for a chain."""
        return None

    def enter(self, step: LaunchedStep, forward: ForwardBatch) -> None:
        if step.rows.has_drafts:
            step.drafts = StepNotes()

    def settled(self, step: LaunchedStep, sampled: list[ScheduledSequence], results: dict[int, SequenceResult]) -> None:
        if self._of_parts.is_any:
            self.enter_parts([s for s in sampled if results[s.slot].goes_on], results)

    def enter_parts(self, sampled: Sequence[ScheduledSequence], results: dict[int, SequenceResult]) -> None:
        """Put what features' parts draft into the results, in the place of drafts that begin otherwise."""
        if self._of_parts.is_any:
            for slot in self._of_parts.enter(sampled, results, self.parents):
                self.replace(slot)

    def verify(self, step: LaunchedStep) -> dict[int, Gain]:
        return self._verifier.verify(step)

    def pick(self, step: LaunchedStep) -> Tensor:
        return self._verifier.pick(step)

    def count(self, step: LaunchedStep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.ahead.count(step)

    def gained(self, step: LaunchedStep, scheduled: ScheduledSequence, picked: list[int], row: int) -> Gain:
        return self._verifier.gained(scheduled, picked, row, StepNotes.of(step).trees.get(scheduled.slot))

    def finish(self, scheduled: ScheduledSequence, token_ids: list[int]) -> None:
        self.ahead.finish(scheduled, token_ids)

    def chains(self, step: LaunchedStep, picked: np.ndarray) -> dict[int, SequenceResult] | None:
        rows, table = step.rows, self.table
        if rows.plan is None or StepNotes.of(step).trees or self.sampling.may_end(rows.slot_set):
            return None
        slots, num_new, _ = rows.plan
        counts = np.bincount(rows.sequences, minlength=len(slots))  # rows of each sequence; none of a prompt's chunk
        first = np.cumsum(counts) - counts
        plain, drafted = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        table.settle(slots[plain], picked[first[plain]])
        num_drafts = counts[drafted] - 1
        drafts = np.concatenate([step.batch.sequences[i].draft_token_ids for i in drafted.tolist()])
        gained = count_gained(drafts, picked[ranges(first[drafted], num_drafts)], num_drafts)
        tokens = picked[ranges(first[drafted], gained)]
        if step.num_ahead is None:
            settle_chains(table, slots[drafted], num_new[drafted], num_drafts, gained, tokens)
        else:
            ahead = self.ahead.slots[slots[drafted]]
            of_each = np.repeat(ahead, gained)
            if ahead.any():
                self.ahead.settle(slots[drafted[ahead]], num_drafts[ahead], gained[ahead], tokens[of_each])
            rest = drafted[~ahead]
            if len(rest):
                settle_chains(table, slots[rest], num_new[rest], num_drafts[~ahead], gained[~ahead], tokens[~of_each])
        stand = np.minimum(counts, 1)
        stand[drafted] = gained
        mine = picked.tolist()
        return {
            slot: SequenceResult(slot, mine[start : start + count])
            for slot, start, count in zip(slots.tolist(), first.tolist(), stand.tolist(), strict=True)
            if count
        }
