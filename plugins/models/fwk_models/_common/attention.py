"""Attention whose queries and keys are normalised head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk_layers import Attention, QKNorm, QKVLinear, RMSNorm, RotaryEmbedding, RotaryRows, RowParallelLinear

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch


class NormedAttention:
    """Grouped-query attention with rotary positions and normalised queries and keys (Qwen3, Gemma 3)."""

    def __init__(
        self,
        context: ModelContext,
        rotary: RotaryEmbedding,
        prefix: str,
        index: int,
        *,
        norm: type[RMSNorm] = RMSNorm,
        bias: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        config = context.config
        self.rotary, self.head_size = rotary, config.head_size
        self.qkv = self.only_reader = QKVLinear(context, prefix, bias=bias)
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads
        self.norm = QKNorm(context, prefix, self.num_heads, self.num_kv_heads, norm=norm)
        self.output = RowParallelLinear(
            context,
            f"{prefix}.o_proj",
            config.num_heads * config.head_size,
            config.hidden_size,
            num_units=config.num_heads,
            bias=bias,
        )
        self.attention = Attention(
            context,
            self.num_heads,
            self.num_kv_heads,
            scale=scale,
            sliding_window=config.window_of(index),
            soft_cap=soft_cap,
            index=index,
            prefix=prefix,
        )

    def __call__(self, x: Tensor, rows: RotaryRows, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same, of the last layer the wanted tokens."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)
        return self.output(self.attention.turned(qkv, self.rotary, rows, batch, self.norm))
