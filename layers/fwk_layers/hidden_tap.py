"""Where a model's residual stream is read, and changed, from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class HiddenTap:
    """Keeps the residual stream that a layer gets, where a head wants it; else it does nothing.

    A decoder layer calls it with the stream as it comes in, attention's and the last network's outputs added. EAGLE-3
    (arXiv:2503.01840, 3.1) reads a low, a middle and a high one.

    Before that it hands to ``change`` what is still to be added to the stream: the last network's output, before the
    first layer the embeddings; in models whose layers add at once (GPT-2, OPT, ...) the stream itself. What functions
    in ``changes`` add to it in place, [num_tokens, hidden_size], is in the stream that the layer and all after it get.
    """

    def __init__(self, context: ModelContext, index: int) -> None:
        """index: the number of layers before it."""
        self.is_wanted = False
        self.value: Tensor | None = None
        self.changes: list[Callable[[Tensor], None]] = []
        self._was_handed = False
        self._operators = context.operators
        context.taps[index] = self

    def change(self, added: Tensor) -> None:
        """Hand ``added`` to everything in ``changes``. Nothing is, while steps are captured."""
        for call in self.changes:
            call(added)
        self._was_handed = True

    def __call__(self, stream: Tensor) -> None:
        """stream: [num_tokens, hidden_size], which layers continue to change in place."""
        if self.changes and not self._was_handed:
            raise ModelLoadError("this model's layers hand their residual stream to nobody (HiddenTap.change)")
        if self.is_wanted:
            self.value = self._operators.join([stream])
