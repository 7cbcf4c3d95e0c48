"""What keeps a worker's sequences inside their grammars: a feature's part (``WorkerPart.grammars``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from fwk.interfaces.sampling import LogitsProcessor

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fwk.interfaces.grammar import Grammar
    from fwk.interfaces.sampling import SamplingContext
    from fwk.interfaces.step import SequenceRecords

Mask = Callable[["Tensor", "np.ndarray", "np.ndarray"], None]
"""``Sampler.mask``."""


class GrammarProcessor(LogitsProcessor):
    """The first of all logits processors: masks tokens that a sequence's grammar forbids."""

    @abstractmethod
    def grammar(self, slot: int) -> Grammar | None:
        """That of a slot's sequence, after the tokens that ``ends`` was told of; None without, and at its end."""


class GrammarStore(Protocol):
    """Compiles grammars in threads of its own, and keeps them for those who will ask again.

    What it does follows from the order of the calls alone, so that the workers of a group number grammars alike.
    """

    def begin(self, build: Callable[[], None]) -> object:
        """Build what compiles grammars before a first request waits for it; nobody need wait for that to be done."""
        ...

    def prepare(self, kind: str, source: str) -> int:
        """Start compiling for a sequence that waits; returns the grammar's number. It lasts until taken or released."""
        ...

    def ready(self, numbers: Sequence[int]) -> list[bool]:
        """Which grammars are compiled, or found to be wrong."""
        ...

    def release(self, number: int) -> None:
        """A sequence that waited has ended."""
        ...

    def masks(self, context: SamplingContext, table: SequenceRecords, mask: Mask) -> GrammarProcessor:
        """What masks the sequences of a table."""
        ...

    def close(self) -> None:
        """Compile nothing more."""
        ...
