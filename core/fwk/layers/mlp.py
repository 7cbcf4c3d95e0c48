"""Feed-forward layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.layers.linear import ColumnParallelLinear, Part, RowParallelLinear

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up computed as one."""

    def __init__(self, context: ModelContext, prefix: str, *, bias: bool = False) -> None:
        config = context.config
        hidden, inner = config.hidden_size, config.intermediate_size
        activation = config.raw.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ModelLoadError(f"{prefix}: activation {activation!r} is not known to GatedMLP, only silu")
        parts = [Part(f"{prefix}.{name}_proj", inner) for name in ("gate", "up")]
        self.gate_up = ColumnParallelLinear(context, parts, hidden, bias=bias)
        self.down = RowParallelLinear(context, f"{prefix}.down_proj", inner, hidden, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))
