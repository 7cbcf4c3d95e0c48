"""Feed-forward layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk_layers.activation import activation as activation_named
from fwk_layers.linear import ColumnParallelLinear, RowParallelLinear
from fwk_layers.sharding import Part

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
        self.activation = str(activation or config.raw.get("hidden_act") or "silu")
        activation_named(self.activation)  # one that is unknown is reported now
        self.operators = context.operators
        parts = [Part(f"{prefix}.{name}_proj", inner) for name in ("gate", "up")]
        self.gate_up = self.only_reader = ColumnParallelLinear(context, parts, hidden, bias=bias)
        self.down = RowParallelLinear(context, f"{prefix}.down_proj", inner, hidden, bias=bias)
        self.group = self.down.input_group

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        x = self.gate_up(x)
        if self.group is None:
            return self.down(self.operators.gate(x, self.activation))
        return self.down(self.operators.gate_rounded(x, self.activation, self.group))
