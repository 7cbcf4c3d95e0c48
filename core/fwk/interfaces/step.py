"""A step of a worker between its plan and its results: whose rows its logits have, and what was given to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.errors import BlameSequence
    from fwk.interfaces.feature import WorkerPart
    from fwk.types import Batch, ScheduledSequence


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How the tokens of some slots are chosen: what stays the same as long as their sequences do.

    - ``is_greedy``: [n] bool
    - ``seeds``: [n] uint64
    - ``all_greedy``: whether all are.
    - ``wants_logprobs``: whether log-probabilities of at least one are wanted.
    """

    is_greedy: np.ndarray
    seeds: np.ndarray
    all_greedy: bool
    wants_logprobs: bool


class SequenceRecords(Protocol):
    """A worker's lasting memory of its sequences: one row per slot.

    token_ids: [num_slots, max_model_len + 1] int32, of which ``num_tokens`` [num_slots] int64 count; the newest
        ``unknown`` of them only the device knows yet; the first ``num_prompt`` are the prompt's.
    num_computed: [num_slots] int64, tokens whose K/V are there. num_blocks: [num_slots] int64, held of ``block_size``.
    block_tables: for each KV group, [num_slots + 1, max_blocks] int32; the last row, ``null_slot``, is nobody's.
    is_greedy: [num_slots] bool. seeds: [num_slots] uint64. namespaces: as in ``DraftView``.
    has_states: of recurrent layers: a step with a rejected draft then counts as not computed at all.
    """

    token_ids: np.ndarray
    num_tokens: np.ndarray
    num_prompt: np.ndarray
    unknown: np.ndarray
    num_computed: np.ndarray
    num_blocks: np.ndarray
    is_greedy: np.ndarray
    seeds: np.ndarray
    block_tables: list[np.ndarray]
    namespaces: list[str]
    block_size: int
    null_slot: int
    has_states: bool

    def kv_slots(self, slots: np.ndarray | int, positions: np.ndarray, group: int = 0) -> np.ndarray:
        """Where in the KV cache layers of ``group`` keep the tokens at ``positions`` of ``slots``: [n] int64 each."""
        ...

    def sampling_state(self, slots: np.ndarray) -> SamplingState:
        """What the sequences in ``slots`` [n] asked for."""
        ...

    def parts_of(self, slots: np.ndarray) -> tuple[WorkerPart, ...]:
        """The parts of features in the sequences in ``slots`` [n]."""
        ...

    def is_undone(self, scheduled: ScheduledSequence, token_ids: list[int]) -> bool:
        """Whether a step that gained a sequence these tokens is taken back, states and all."""
        ...

    def finish(self, scheduled: ScheduledSequence, token_ids: list[int]) -> None:
        """Take in what a step made of a sequence: its K/V, less rejected drafts, and its new tokens."""
        ...

    def settle(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Take in tokens that only the device knew, the oldest of each slot: [num_rows] each."""
        ...


class DrawnDrafts(Protocol):
    """Drafts of a step whose rows are more than compared with what is picked."""

    def settle(
        self, logits: Tensor, rows: StepRows, is_greedy: np.ndarray, finished: Callable[[np.ndarray, Tensor], Tensor]
    ) -> tuple[Tensor, list[int], Callable[[Tensor], Tensor] | None]:
        """Before tokens are picked of ``logits`` [num_rows, vocab_size].

        finished: ``finished(rows, index)``, logits of some rows after all processors; ``index``: the rows on the
        device. Returns logits to pick from, the rows for which all processors have run, and what then has the last word
        on the tokens, [num_rows] int64 to the same; None: nothing has.
        """
        ...


@dataclass(slots=True)
class StepRows:
    """Which rows of the step's logits belong to whom. A sequence whose drafts are verified has several rows.

    - ``sequences``: [num_rows] int64: place in the batch
    - ``slots``: [num_rows] int64
    - ``num_tokens``: [num_rows] int64: tokens before the position the logits are for
    - ``drawn``: of some rows' drafts
    - ``slots_on_device``: [num_rows] int64, where the device is not the host
    - ``wants_hidden``: of all tokens, for a feature's part
    - ``parts``: of features
    - ``has_drafts``: the texts of some end in drafts
    - ``num_fewer``: [num_rows] int64 on the device: tokens that ``num_tokens`` counts and that were rejected; None: of
      none
    - ``most_fewer``: those that may have been, of each row at most
    - ``plan``: of the whole step, [num_seqs] each: slots, new tokens, and whether a token is sampled
    """

    sequences: np.ndarray
    slots: np.ndarray
    num_tokens: np.ndarray
    drawn: DrawnDrafts | None = None
    slots_on_device: Tensor | None = None
    wants_hidden: bool = False
    parts: tuple[WorkerPart, ...] = ()
    has_drafts: bool = False
    num_fewer: Tensor | None = None
    most_fewer: int = 0
    plan: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    _sampling_state: SamplingState | None = None  # once somebody has asked for it
    _slot_set: frozenset[int] | None = None

    @property
    def slot_set(self) -> frozenset[int]:
        """The slots, each once."""
        if self._slot_set is None:
            self._slot_set = frozenset(self.slots.tolist())
        return self._slot_set

    def sampling_state(self, table: SequenceRecords) -> SamplingState:
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

    def take(self, places: np.ndarray, index: Tensor) -> StepRows:
        """Some of the rows, ``places`` [n] int64. index: the same on the device."""
        rows = StepRows(
            self.sequences[places], self.slots[places], self.num_tokens[places], self.drawn, has_drafts=self.has_drafts
        )
        if self.num_fewer is not None:
            rows.num_fewer, rows.most_fewer = self.num_fewer.index_select(0, index), self.most_fewer
        return rows


@dataclass(slots=True)
class LaunchedStep:
    """What the runner has given the device to do in a step, but for the choice of tokens.

    - ``batch``: its plan.
    - ``rows``: of its logits.
    - ``failed``: slots that a part or a processor has refused, and why.
    - ``logits``: [num_rows, vocab_size]; None: no token is chosen.
    - ``seconds``: that the pass took, or its launch.
    - ``made``: by features' parts, with what each has made.
    - ``hidden``: [num_hidden, n], hidden states and what taps keep, where ``Drafting.reads_hidden``.
    - ``drafts``: what ``Drafting`` keeps of it.
    - ``num_ahead``: [num_seqs] int64: drafts of sequences that run ahead, 0 of others; None: of none.
    - ``numbers``: of any shape, on the device, to be on the host with the tokens: for ``Drafting.arrived``.
    - ``following``: the step that was launched before this one was settled, if any.
    - ``drafting``: seconds that drafts took when it was launched.
    """

    batch: Batch
    rows: StepRows
    failed: dict[int, BlameSequence]
    logits: Tensor | None = None
    seconds: float = 0.0
    made: Sequence[tuple[WorkerPart, Any]] = ()
    hidden: Tensor | None = None
    drafts: Any = None
    num_ahead: np.ndarray | None = None
    numbers: Tensor | None = None
    following: LaunchedStep | None = None
    drafting: float = 0.0
