"""Sequences come to slots and leave them, in all that keeps something of each."""

from __future__ import annotations

from fwk.errors import BlameSequence
from fwk.interfaces.drafting import Drafting
from fwk.types import Batch
from fwk.worker.kv.states import StateStore
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.pipeline import SamplingPipeline


class Members:
    """What a step's plan changes before the step. sampling: None where no token is chosen."""

    def __init__(
        self, table: SequenceTable, states: StateStore | None, sampling: SamplingPipeline | None, drafting: Drafting
    ) -> None:
        self._table = table
        self._states = states
        self._sampling = sampling
        self._drafting = drafting

    def begin(self, batch: Batch) -> dict[int, BlameSequence]:
        """Apply the plan to the lasting state; returns the slots that a part or a logits processor refused, and why."""
        for slot in batch.freed_slots:
            if self._sampling is not None:
                self._sampling.remove(slot)
            self._table.forget_features(slot)
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
            self._drafting.begin(new.slot)
        return failed
