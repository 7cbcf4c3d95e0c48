"""Feed-forward layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.layers.activation import activation as activation_named
from fwk.layers.linear import ColumnParallelLinear, RowParallelLinear
from fwk.layers.sharding import Part

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class GatedMLP:
    """down(activation(gate(x)) * up(x)), with gate and up computed as one."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        *,
        intermediate_size: int | None = None,
        activation: str | None = None,
        bias: bool = False,
    ) -> None:
        """Sizes and activation not given are the config's."""
        config = context.config
        hidden, inner = config.hidden_size, intermediate_size or config.intermediate_size
        self.activation = activation_named(activation or config.raw.get("hidden_act") or "silu")
        parts = [Part(f"{prefix}.{name}_proj", inner) for name in ("gate", "up")]
        self.gate_up = ColumnParallelLinear(context, parts, hidden, bias=bias)
        self.down = RowParallelLinear(context, f"{prefix}.down_proj", inner, hidden, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))
