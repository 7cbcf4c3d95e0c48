"""Where heads read a model's residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class HiddenTap:
    """Keeps the residual stream that a layer gets, where a head wants it; else it does nothing.

    A decoder layer calls it with the stream as it comes in, attention's and the last network's outputs added. EAGLE-3
    (arXiv:2503.01840, 3.1) reads a low, a middle and a high one.
    """

    def __init__(self, context: ModelContext, index: int) -> None:
        """index: the number of layers before it."""
        self.is_wanted = False
        self.value: Tensor | None = None
        self._operators = context.operators
        context.taps[index] = self

    def __call__(self, stream: Tensor) -> None:
        """stream: [num_tokens, hidden_size], which layers continue to change in place."""
        if self.is_wanted:
            self.value = self._operators.join([stream])
