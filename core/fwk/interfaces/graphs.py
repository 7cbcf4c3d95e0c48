"""Capturing a step once, to replay it with one call.

A CPU's operators record a tape of native calls, which serves steps of every size; a CUDA graph serves one size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from torch import Tensor

from fwk.errors import NotCapturable as NotCapturable
from fwk.types import ForwardBatch

if TYPE_CHECKING:
    from fwk.interfaces.attention import AttentionBackend

Cut = Callable[[], None]
"""Ends a piece of a step that is captured, and begins the next."""

StepOutput = tuple[Tensor, Tensor | None]
"""Hidden states [num_hidden, hidden_size], and logits [num_logits, vocab_size] if ``batch.logits_indices`` has any.

Valid until the next step.
"""


class StepSize(NamedTuple):
    """All that sets a step apart from another, besides what is in the input buffers and the plan of attention.

    - ``num_tokens``: of all sequences.
    - ``num_hidden``: hidden states that are wanted: of all tokens, or fewer (``ForwardBatch.hidden_indices``)
    - ``num_logits``: rows of logits.
    - ``num_seqs``: sequences.
    """

    num_tokens: int
    num_hidden: int
    num_logits: int
    num_seqs: int

    @staticmethod
    def of(batch: ForwardBatch) -> StepSize:
        """That of a batch."""
        num_hidden = batch.num_tokens if batch.hidden_indices is None else len(batch.hidden_indices)
        return StepSize(batch.num_tokens, num_hidden, len(batch.logits_indices), batch.num_seqs)


class Graph(ABC):
    """A captured step. Its inputs are read where they were when it was captured."""

    @abstractmethod
    def replay(self, size: StepSize) -> StepOutput:
        """Compute a step of that size, with one call. The same tensors come back as long as the size is the same."""


class GraphCapture(ABC):
    """How a device, or a set of operators, captures steps.

    - ``serves_smaller``: whether what ``capture`` makes replays steps of every size up to the one it was made for,
      prompts included; else it replays that size alone, and steps are padded to the next of some sizes.
    """

    serves_smaller: ClassVar[bool] = True

    @abstractmethod
    def capture(self, step: Callable[[StepSize], StepOutput], most: StepSize) -> Graph:
        """Make what replays steps up to ``most``, or of that size alone (``serves_smaller``).

        ``step`` computes one of any size, or of that size alone, on inputs that mean nothing. It may be called several
        times, and what it stores in the KV cache means nothing either.

        Raises ``NotCapturable``.
        """

    def capture_pieces(self, step: Callable[[Cut | None], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        """Capture a step in pieces, between which something else is computed each time.

        ``step`` computes one on inputs that mean nothing, and calls what it is given where a piece ends; with None,
        some times before the capture, it has nothing to call. Returns what replays each piece, in order, and what
        ``step`` returned (of its shape), valid until the next replay of anything that this object has captured.

        Raises ``NotCapturable``.
        """
        raise NotCapturable("this device captures no pieces of steps")


class CapturedPieces(Protocol):
    """Steps of some numbers of tokens, captured in pieces between which attention is computed.

    - ``refusal``: why none is replayed; empty: they are.
    """

    refusal: str

    def prepare(
        self, step: Callable[[ForwardBatch], tuple[Tensor, int]], blank: Callable[[int], ForwardBatch]
    ) -> tuple[int, ...]:
        """Capture all sizes; these, or none where it cannot be done.

        step: computes hidden states [num_tokens, (1 + number of taps) * width] and tells the width, of which the first
        are the model's. blank: makes a batch of so many tokens, whose numbers mean nothing.
        """
        ...

    def run(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """The hidden states of a step with ``piece_tokens``, [num_tokens, width], and those with what taps keep.

        Both are of its own tokens alone.
        """
        ...


class StepPieces(Protocol):
    """Cuts a model's steps into pieces that are replayed (``WorkerPart.pieces``).

    attention: as the model is to call it. sizes: numbers of tokens, smallest first; steps between are padded.

    - ``label``: what messages call it: the option that asks for it.
    """

    label: str

    @property
    def attention(self) -> AttentionBackend: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def captures(
        self, capture: GraphCapture, sizes: Sequence[int], around: Callable[[], AbstractContextManager[None]] = ...
    ) -> CapturedPieces:
        """Some of the sizes, which are not captured yet. around: what they are to be captured within."""
        ...
