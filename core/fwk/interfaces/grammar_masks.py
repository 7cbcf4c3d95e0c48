"""What keeps a worker's sequences inside their grammars: a feature's part (``WorkerPart.masks``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from fwk.interfaces.sampling import LogitsProcessor

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fwk.interfaces.grammar import Grammar

Mask = Callable[["Tensor", "np.ndarray", "np.ndarray"], None]
"""``Sampler.mask``."""


class GrammarProcessor(LogitsProcessor):
    """The first of all logits processors: masks tokens that a sequence's grammar forbids."""

    @abstractmethod
    def grammar(self, slot: int) -> Grammar | None:
        """That of a slot's sequence, after the tokens that ``ends`` was told of; None without, and at its end."""
