"""Queries, keys and values of a layer: from one stored matrix or from three."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk_layers import ColumnParallelLinear, Part, QKVLinear
from fwk_layers.sharding import output_shard

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class SplitQKV:
    """``q_proj``, ``k_proj`` and ``v_proj`` below a prefix, computed as one."""

    def __init__(self, context: ModelContext, prefix: str, *, bias: bool = False) -> None:
        self.linear = QKVLinear(context, prefix, bias=bias)
        self.num_heads, self.num_kv_heads = self.linear.num_heads, self.linear.num_kv_heads
        self.head_size = context.config.head_size

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, hidden_size] to q, k and v: [num_tokens, heads, head_size] each."""
        qkv = self.linear(x).view(x.shape[0], -1, self.head_size)
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return q, k, v


class JoinedQKV(SplitQKV):
    """One matrix ``name``: the rows of all queries, then of all keys, then of all values."""

    def __init__(self, context: ModelContext, name: str, *, bias: bool = False) -> None:
        config, size = context.config, context.config.head_size
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        part = Part(name, sum(heads) * size, segments=tuple((count * size, count) for count in heads))
        self.linear = ColumnParallelLinear(context, [part], config.hidden_size, bias=bias)
        self.num_heads, self.num_kv_heads = (
            output_shard(Part(name, count * size, count), context.tp).part_of(count) for count in heads[:2]
        )
        self.head_size = size


class GroupedQKV:
    """One matrix ``name``: for each K/V head the rows of its queries, then its key, then its value."""

    def __init__(self, context: ModelContext, name: str, *, bias: bool = False) -> None:
        config, size = context.config, context.config.head_size
        if config.num_kv_heads % context.tp.size:
            raise ModelLoadError(
                f"{name}: {config.num_kv_heads} groups of heads cannot be shared by {context.tp.size} ranks; "
                f"choose a --tensor-parallel-size that divides {config.num_kv_heads}"
            )
        self.group, self.head_size = config.num_heads // config.num_kv_heads, size
        part = Part(name, config.num_kv_heads * (self.group + 2) * size, config.num_kv_heads)
        self.linear = ColumnParallelLinear(context, [part], config.hidden_size, bias=bias)
        self.num_kv_heads = config.num_kv_heads // context.tp.size
        self.num_heads = self.num_kv_heads * self.group

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, hidden_size] to q, k and v: [num_tokens, heads, head_size] each."""
        qkv = self.linear(x).view(x.shape[0], self.num_kv_heads, self.group + 2, self.head_size)
        return qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2].contiguous(), qkv[:, :, -1].contiguous()
