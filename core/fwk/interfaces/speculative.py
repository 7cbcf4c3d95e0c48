"""Speculative decoding: a decoder proposes, core verifies and rolls back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


@dataclass(slots=True)
class DraftView:
    """The sequences that could use drafts after a step.

    ``hidden`` is there when ``wants_hidden`` was declared: the states of the last accepted tokens.
    """

    slots: np.ndarray  # [num_seqs] int64
    num_tokens: np.ndarray  # [num_seqs] int64: tokens known of each sequence, the newest included
    max_drafts: np.ndarray  # [num_seqs] int64: most that may be proposed for each
    token_ids: np.ndarray  # [num_slots, max_model_len] int32
    hidden: Tensor | None = None  # [num_seqs, num_layers_wanted, hidden_size]


@dataclass(slots=True)
class Drafts:
    """Proposed continuations, each with its own depth (empty is fine).

    ``parents[i][j]`` is the index in ``token_ids[i]`` of token j's parent in a tree, -1 for the sequence's end; None
    means chains. ``probabilities`` are the distributions the tokens were drawn from; None means they were certain.
    """

    token_ids: list[list[int]]
    parents: list[list[int]] | None = None
    probabilities: Tensor | None = None  # [sum of depths, vocab_size]


@dataclass(slots=True)
class Verified:
    """What became of the last drafts."""

    slots: np.ndarray  # [num_seqs] int64
    num_drafts: np.ndarray  # [num_seqs] int64
    num_accepted: np.ndarray  # [num_seqs] int64


@dataclass(frozen=True, slots=True)
class SpeculativeContext:
    """What a decoder is built with. ``model_context`` builds layers that share the target's cache and backend."""

    num_slots: int
    max_model_len: int
    model_context: ModelContext
    options: Any = None


class SpeculativeDecoder(ABC):
    """Worker side; may own layers in the KV cache."""

    def __init__(self, context: SpeculativeContext) -> None:
        self.context = context

    @abstractmethod
    def propose(self, view: DraftView) -> Drafts:
        """Drafts for the next step, one list per sequence of ``view``."""

    def observe(self, verified: Verified) -> None:
        """Told how many drafts were accepted, before the next ``propose``."""

    def forget(self, slots: Sequence[int]) -> None:
        """These slots' sequences are gone."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeDecoderSpec(Declaration):
    """Declares a speculative decoder (``--speculative-algorithm``)."""

    family: ClassVar[str] = "speculative"

    wants_hidden: tuple[int, ...] = field(default=())  # layers whose states propose needs; -1 the last
    proposes_trees: bool = False
