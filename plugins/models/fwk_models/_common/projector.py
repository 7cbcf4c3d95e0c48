"""From an encoder's rows to the decoder's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import ReplicatedLinear, activation

if TYPE_CHECKING:
    from torch import Tensor


class Projector:
    """LLaVA's: two layers from the encoder's size to the decoder's."""

    def __init__(self, context: ModelContext, prefix: str, hidden: int) -> None:
        raw, size = context.config.raw, context.config.hidden_size
        bias = bool(raw.get("multimodal_projector_bias", True))
        self.up = ReplicatedLinear(context, f"{prefix}.linear_1", hidden, size, bias=bias)
        self.down = ReplicatedLinear(context, f"{prefix}.linear_2", size, size, bias=bias)
        self.activation = activation(str(raw.get("projector_hidden_act", "gelu")))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] to [n, hidden_size of the decoder]."""
        return self.down(self.activation(self.up(x)))
