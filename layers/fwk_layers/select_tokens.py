"""The tokens that are still wanted when a decoder's last layer has stored its K and V."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch


class SelectTokens:
    """Tokens that a decoder layer continues with after attention: all, in the last layer those of ``hidden_indices``.

    Tokens that come later need K and V of all tokens, and nothing else of the last layer. ``fwk_layers.Attention`` asks
    this for its outcome when it is told its layer's index; the layer asks it for its residual stream. A model in which
    both do has ``Model.prunes_last_layer``.
    """

    def __init__(self, context: ModelContext, index: int) -> None:
        self.is_last = index == context.config.num_layers - 1
        self._operators = context.operators

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[num_tokens, size] to the same, or to a copy of the wanted rows [num_hidden, size]."""
        if not self.is_last or batch.hidden_indices is None:
            return x
        return self._operators.rows(x.contiguous(), batch.hidden_indices)
