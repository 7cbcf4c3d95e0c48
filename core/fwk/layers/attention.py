"""A model's attention layer: a place in the KV cache and a call to the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.attention import AttentionLayer

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch


class Attention:
    """Causal attention over the paged past. Head counts are this rank's (``QKVLinear`` knows them)."""

    def __init__(
        self,
        context: ModelContext,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_size: int | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        size = context.config.head_size if head_size is None else head_size
        self.backend = context.attention
        self.layer = AttentionLayer(
            index=len(context.attention_layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=size,
            scale=size**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        context.attention_layers.append(self.layer)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """q: [num_tokens, num_heads, head_size]; k, v: [num_tokens, num_kv_heads, head_size], k rotated.

        Returns [num_tokens, num_heads * head_size].
        """
        return self.backend.forward(q, k, v, self.layer, batch).reshape(q.shape[0], -1)
