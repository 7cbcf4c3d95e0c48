"""Sequences come to slots and leave them, in all that keeps something of each."""

from __future__ import annotations

from fwk.errors import BlameSequence
from fwk.types import Batch, SequenceResult
from fwk.worker.drafting.drafting import NoDrafting
from fwk.worker.kv.states import StateStore
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.pipeline import SamplingPipeline


class Members:
    """What a step's plan changes before the step. sampling: None where no token is chosen."""

    def __init__(
        self, table: SequenceTable, states: StateStore | None, sampling: SamplingPipeline | None, drafting: NoDrafting
    ) -> None:
        self._table = table
        self._states = states
        self._sampling = sampling
        self._drafting = drafting
        self.to_tell: set[int] = set()  # slots of sequences that run ahead, and whose results have not said so

    def begin(self, batch: Batch) -> dict[int, BlameSequence]:
        """Apply the plan to the lasting state; returns the slots that a part or a logits processor refused, and why."""
        for slot in batch.freed_slots:
            if self._sampling is not None:
                self._sampling.remove(slot)
            self._table.forget_features(slot)
        self.to_tell.difference_update(batch.freed_slots)
        self._drafting.forget(batch.freed_slots)
        self._table.begin(batch)
        if self._states is not None:
            self._states.begin(batch)
        failed: dict[int, BlameSequence] = {}
        for new in batch.new:
            try:
                if new.features:
                    self._table.begin_features(new)
                if self._sampling is not None:
                    self._sampling.add(new)
            except BlameSequence as error:
                if self._sampling is not None:
                    self._sampling.remove(new.slot)
                failed[new.slot] = error
                continue
            if self._drafting.runs_ahead and self._may_run_ahead(new.slot):
                self._table.runs_ahead[new.slot] = True
                self.to_tell.add(new.slot)
        return failed

    def _may_run_ahead(self, slot: int) -> bool:
        """Whether all that follows from the number of accepted drafts is done where that is known, on the device."""
        assert self._sampling is not None, "nothing is drafted where no token is chosen"
        parts = self._table.parts.of(int(self._table.features[slot]))
        return not any(part.needs_lengths for part in parts) and self._sampling.may_be_late(slot)

    def tell(self, results: dict[int, SequenceResult]) -> None:
        """Say of sequences that run ahead, with their first results, that they do."""
        for slot in self.to_tell.intersection(results):
            results[slot].runs_ahead = True
            self.to_tell.discard(slot)
