"""The sequences of a step, and what stays of it for the next one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fwk.features.worker import wants_hidden
from fwk.interfaces.feature import WorkerPart
from fwk.interfaces.step import SamplingState, StepRows
from fwk.types import Batch, ForwardBatch
from fwk.worker.runner.sequence_table import SequenceTable


@dataclass(slots=True)
class DecodeStep:
    """A step of one token for each sequence, all of which sampled."""

    slots: list[int]
    forward: ForwardBatch
    rows: StepRows
    num_left: int  # steps until the longest sequence reaches past the table of blocks

    def is_before(self, batch: Batch) -> bool:
        """Whether a batch is the same sequences' next such step."""
        if batch.new or not self.num_left or len(batch.sequences) != len(self.slots):
            return False
        return all(
            s.slot == slot and s.num_new_tokens == 1 and s.samples
            for s, slot in zip(batch.sequences, self.slots, strict=True)
        )


@dataclass(slots=True)
class StepMembers:
    """The sequences of a step, in order, and what stays the same as long as they do."""

    listed: list[int]  # their slots
    slots: np.ndarray  # the same, [num_seqs] int64
    sampling: SamplingState
    slot_set: frozenset[int]
    starts: np.ndarray  # of a decode step, [num_seqs + 1]
    ones: np.ndarray  # [num_seqs] int64
    each: np.ndarray  # [num_seqs] bool, True
    parts: tuple[WorkerPart, ...]  # of features

    @staticmethod
    def of(listed: list[int], table: SequenceTable) -> StepMembers:
        slots = np.array(listed, np.int64)
        return StepMembers(
            listed,
            slots,
            table.sampling_state(slots),
            frozenset(listed),
            np.arange(len(slots) + 1),
            np.ones(len(slots), np.int64),
            np.ones(len(slots), bool),
            table.parts_of(slots),
        )

    def is_eager(self, batch: Batch) -> bool:
        """Whether layers must be called in a step of them, not replayed."""
        return any(part.calls_layers(batch) for part in self.parts)

    @property
    def reads_hidden(self) -> bool:
        """Whether hidden states of all tokens of a step are wanted."""
        return wants_hidden(self.parts, self.slots)

    def rows(self, computed: np.ndarray) -> StepRows:
        """Of a decode step in which all are sampled; computed: [num_seqs] int64, tokens before the step."""
        places, plan = self.starts[:-1], (self.slots, self.ones, self.each)
        rows = StepRows(places, self.slots, computed + 1, wants_hidden=self.reads_hidden, parts=self.parts, plan=plan)
        rows.share(self.sampling, self.slot_set)
        return rows
