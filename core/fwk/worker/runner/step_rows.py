"""The sequences of a step, and which rows of its logits are theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fwk.features.worker import wants_hidden
from fwk.interfaces.feature import WorkerPart
from fwk.types import Batch, ForwardBatch
from fwk.worker.runner.sequence_table import SamplingState, SequenceTable


@dataclass(slots=True)
class StepRows:
    """Which rows of the step's logits belong to whom. A sequence whose drafts are verified has several rows."""

    sequences: np.ndarray  # [num_rows] int64: place in the batch
    slots: np.ndarray  # [num_rows] int64
    num_tokens: np.ndarray  # [num_rows] int64: tokens before the position the logits are for
    drawn: Mapping[tuple[int, int], tuple[int, torch.Tensor | None]] = field(default_factory=dict)
    """(slot, num_tokens) of a row -> the draft at that place and the distribution [vocab_size] it was drawn from; None:
    it was certain, and a threshold may keep it."""
    slots_on_device: torch.Tensor | None = None  # where the device is not the host
    wants_hidden: bool = False  # of all tokens, for a feature's part
    parts: tuple[WorkerPart, ...] = ()  # of features
    has_drafts: bool = False  # the texts of some end in drafts
    num_fewer: torch.Tensor | None = None
    """[num_rows] int64 on the device: tokens that ``num_tokens`` counts and that were rejected; None: of none."""
    most_fewer: int = 0  # those that may have been, of each row at most
    plan: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    """Of the whole step, [num_seqs] each: slots, new tokens, and whether a token is sampled."""
    _sampling_state: SamplingState | None = None
    """Of the rows' slots, once somebody has asked for them (``sampling_state``)."""
    _slot_set: frozenset[int] | None = None

    @property
    def slot_set(self) -> frozenset[int]:
        """The slots, each once."""
        if self._slot_set is None:
            self._slot_set = frozenset(self.slots.tolist())
        return self._slot_set

    def sampling_state(self, table: SequenceTable) -> SamplingState:
        """How the rows' tokens are chosen."""
        if self._sampling_state is None:
            self._sampling_state = table.sampling_state(self.slots)
        return self._sampling_state

    @property
    def query_start(self) -> np.ndarray:
        """Where each sequence's tokens begin and end in the step: [num_seqs + 1] int64. Of a whole step only."""
        assert self.plan is not None, "rows that were taken out of a step"
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.plan[1])))

    def share(self, sampling: SamplingState, slot_set: frozenset[int]) -> None:
        """Take what is known of the rows' slots already."""
        self._sampling_state, self._slot_set = sampling, slot_set

    def take(self, places: np.ndarray, index: torch.Tensor) -> StepRows:
        """Some of the rows. index: ``places`` on the device."""
        rows = StepRows(
            self.sequences[places], self.slots[places], self.num_tokens[places], self.drawn, has_drafts=self.has_drafts
        )
        if self.num_fewer is not None:
            rows.num_fewer, rows.most_fewer = self.num_fewer.index_select(0, index), self.most_fewer
        return rows


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
