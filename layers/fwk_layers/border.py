"""Where the layers of one stage end and those of the next begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch


class Border:
    """Hands the residual stream from stage to stage, for models that build ``ModelContext.layers`` alone.

    ``is_last``: the final norm and the LM head are here.
    """

    def __init__(self, context: ModelContext) -> None:
        self._stage = context.tp.stage
        self.is_last = self._stage.is_last
        self._size, self._place = context.config.hidden_size, {"dtype": context.dtype, "device": context.device}

    def enter(self, batch: ForwardBatch) -> Tensor | None:
        """What comes to the first layer here, [num_tokens, hidden_size]; None in the first stage, which embeds."""
        if self._stage.is_first:
            return None
        return self._stage.receive_hidden(torch.empty((batch.num_tokens, self._size), **self._place))

    def leave(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Hand on what the last layer here made, [num_tokens, hidden_size], with the stream it is to be added to."""
        x = x if residual is None else residual + x
        self._stage.send_hidden(x)
        return x
