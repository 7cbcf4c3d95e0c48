"""Drafts in a worker's steps: what makes and verifies them is a feature's part (``WorkerPart.drafting``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fwk.errors import BlameSequence
    from fwk.interfaces.device import Upload
    from fwk.interfaces.feature import WorkerPart
    from fwk.interfaces.model import Model
    from fwk.interfaces.speculative import HeadMaker
    from fwk.interfaces.step import LaunchedStep, SequenceRecords, StepRows
    from fwk.types import Batch, ForwardBatch, ScheduledSequence, SequenceResult

Gain = tuple[list[int], list[int]]
"""A sequence's new tokens (accepted drafts and the one after them), and the rows of logits they were sampled from."""

Positions = Callable[["np.ndarray", "np.ndarray", "np.ndarray", "np.ndarray"], "np.ndarray"]
"""``positions(positions, slots, starts, seq_lens)``: those of a step in which drafts are trees: [num_tokens] int64.

Of the same numbers by place, for slots [num_seqs], whose tokens are between ``starts`` [num_seqs + 1], and who have
``seq_lens`` [num_seqs] with them.
"""


class StepInputs(Protocol):
    """A worker's buffers, for passes of what drafts.

    - ``send``: brings an array to the device; the host does not wait.
    """

    send: Upload

    def fill(
        self,
        slots: np.ndarray,
        token_ids: np.ndarray | Tensor,
        positions: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        wanted: np.ndarray,
        places: np.ndarray | None = None,
    ) -> ForwardBatch:
        """Fill them for tokens of ``slots`` [num_seqs], at places that their blocks reach to.

        The inputs of the step before are overwritten. Those of ``token_ids`` [num_tokens] in a tensor may be on the
        device, and below 0 where they mean nothing. starts: [num_seqs + 1], where each sequence's begin and end;
        seq_lens: [num_seqs], with them. wanted: tokens of which logits are. places: [num_tokens], where their K/V
        stand in the text; None: at ``positions`` [num_tokens].
        """
        ...


class TokenSampling(Protocol):
    """From logits to tokens: processors, then the sampler."""

    def reads_history(self, rows: StepRows) -> bool:
        """Whether a processor that a row asks for must see every token before it on the host."""
        ...

    def takes_places_late(self, slot: int) -> bool:
        """Whether tokens of a slot are the right ones where the device alone knows how many come before them."""
        ...

    def may_be_late(self, slot: int) -> bool:
        """Whether the device chooses the tokens of a slot before the host knows those that come before them."""
        ...

    def may_end(self, slots: frozenset[int]) -> bool:
        """Whether a processor may say that the output of one of these slots is complete."""
        ...

    def choose(self, logits: Tensor, rows: StepRows) -> Tensor:
        """Pick a token for each row of ``logits``: [num_rows] int64, below 0 where none can be, until the next call."""
        ...

    def pick(self, logits: Tensor, rows: StepRows, failed: dict[int, BlameSequence]) -> Tensor:
        """The same, [num_rows] int64, but for ``failed`` slots, to which those that a processor blames are added."""
        ...

    def sample_valid(self, logits: Tensor, rows: StepRows, failed: dict[int, BlameSequence]) -> list[int]:
        """As ``pick``, a token for each row [num_rows], and waits for them."""
        ...


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The served model, as drafts for it go by it.

    algorithm: the speculative decoder that the run asks for; empty: none. shape: of the drafts. next_parts: by slot,
    features' parts that may know what comes next (``WorkerPart.next_tokens``); knows_next: whether there are any.
    load_model, build, tap: as in ``SpeculativeContext``. reasons, troubles: sentences, for /server_info and for the
    results of steps, which may be added.

    - ``model``: as ``ModelSpec.load`` made it.
    - ``name``: as the user gave it.
    - ``num_layers``: of the model, all kinds counted.
    - ``max_model_len``: tokens of prompt and output together.
    - ``is_recurrent``: whether layers keep states.
    - ``has_encoder``: whether an encoder reads the prompts.
    """

    model: Model
    name: str
    algorithm: str
    shape: Literal["none", "chain", "tree", ""]
    num_layers: int
    max_model_len: int
    is_recurrent: bool
    has_encoder: bool
    knows_next: bool
    next_parts: Mapping[int, Sequence[WorkerPart]]
    load_model: Callable[[str], Model]
    build: HeadMaker
    tap: Callable[[Sequence[int]], None]
    reasons: list[str]
    troubles: list[str]


@dataclass(frozen=True, slots=True)
class DraftingParts:
    """The parts of a worker that drafts go through.

    - ``table``: of all its sequences.
    - ``inputs``: its buffers.
    - ``sampling``: its processors and sampler.

    plan: plans attention for a batch. move: ``move(group, source, target)``, K/V of a group's layers from slots to
    others, [n] int64 each. make_room: for so many more passes between two steps. num_taps: of the target, that stand
    alongside its hidden states.
    """

    table: SequenceRecords
    inputs: StepInputs
    sampling: TokenSampling
    plan: Callable[[ForwardBatch], ForwardBatch]
    move: Callable[[int, Tensor, Tensor], None]
    make_room: Callable[[int], None]
    num_taps: int


class DraftingMaker(ABC):
    """Drafts of a model, before the worker's other parts are there; layers that draft are.

    - ``max_drafts``: of a decoder, for one sequence; 0: there is none.
    - ``num_slots``: sequences that may have drafts, the first slots: where layers keep states, another of each is kept.
    - ``reads_hidden``: whether hidden states of all tokens are wanted.
    - ``reads_inputs``: whether the inputs of each step are read, which then cannot be replayed.
    """

    max_drafts: int = 0
    num_slots: int = 0
    reads_hidden: bool = False
    reads_inputs: bool = False

    @abstractmethod
    def build(self, parts: DraftingParts) -> Drafting:
        """What steps ask."""


class Drafting:
    """Drafts in a worker's steps; here there are none.

    Asked in each step: ``trees``, ``enter``, ``computed`` and, once its tokens are known, ``settled``. Of a step with
    drafts also ``verify`` on the host; on a device ``count`` and ``pick``, then ``accept`` and ``chosen``, and when its
    tokens have come, ``arrived``, ``chains`` or ``gained``, and ``finish``. A sequence *runs ahead* whose next step is
    launched while drafts of it are being verified: then only the device knows how many tokens it has.

    - ``max_drafts``: of a decoder, for one sequence; 0: there is none.
    - ``num_taps``: as in ``DraftingParts``.
    - ``runs_ahead``: whether sequences may run ahead.
    - ``reads_hidden``: whether ``LaunchedStep.hidden`` is wanted.
    """

    max_drafts: int = 0
    num_taps: int = 0
    runs_ahead: bool = False
    reads_hidden: ClassVar[bool] | bool = False

    def begin(self, slot: int) -> None:
        """A sequence has taken a slot, and was not refused."""

    def forget(self, slots: Sequence[int]) -> None:
        """These slots' sequences are gone."""

    def replace(self, slot: int) -> None:
        """Others take the place of a slot's newest drafts: a chain, and certain."""

    def trees(self, batch: Batch) -> Positions | None:
        """Where drafts of this step stand that are trees; None: none is."""
        return None

    def enter(self, step: LaunchedStep, forward: ForwardBatch) -> None:
        """The inputs of a step are made, its pass is not begun: put in what only the device knows."""

    def computed(self, step: LaunchedStep, forward: ForwardBatch) -> None:
        """The target has computed these tokens, or been launched to."""

    def settled(self, step: LaunchedStep, sampled: list[ScheduledSequence], results: dict[int, SequenceResult]) -> None:
        """The table has taken in a step's tokens: put drafts for the next one into the results of ``sampled``."""

    def verify(self, step: LaunchedStep) -> dict[int, Gain]:
        """Sample the rows of a step with drafts: what each sequence that samples gains, by slot."""
        raise NotImplementedError

    def pick(self, step: LaunchedStep) -> Tensor:
        """Pick a token for every row of a step with drafts: [num_rows] int64, which the host does not wait for."""
        raise NotImplementedError

    def count(self, step: LaunchedStep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, new tokens and tokens to come, of those in a step with drafts whose number is known: [n] each."""
        raise NotImplementedError

    def accept(self, step: LaunchedStep, picked: Tensor, newest: Tensor) -> None:
        """Have the device count accepted drafts of sequences that run ahead.

        picked: [num_rows] int64; newest: [num_slots] int64, where each one's newest token is to be.
        """

    def chosen(self, step: LaunchedStep, picked: Tensor | None, newest: Tensor) -> None:
        """The choice of a step's tokens was given to the device, and so was their copy to the host.

        picked: [num_rows] int64, None where no token is chosen; newest: as in ``accept``.
        """

    def arrived(self, step: LaunchedStep, numbers: Tensor) -> None:
        """``LaunchedStep.numbers``, in their shape, are on the host."""

    def chains(self, step: LaunchedStep, picked: np.ndarray) -> dict[int, SequenceResult] | None:
        """Results of a step with drafts, all of them chains, of which tokens ``picked`` [num_rows] stand and no more
        was asked; None of any other step, which ``gained`` is asked of. The table has taken them in."""
        raise NotImplementedError

    def gained(self, step: LaunchedStep, scheduled: ScheduledSequence, picked: list[int], row: int) -> Gain:
        """What a sequence with drafts gains, of whose rows, from ``row`` on, these tokens were picked."""
        raise NotImplementedError

    def finish(self, scheduled: ScheduledSequence, token_ids: list[int]) -> None:
        """``SequenceRecords.finish`` of a sequence with drafts."""
        raise NotImplementedError
