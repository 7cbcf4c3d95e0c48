"""A model's attention layer: a place in the KV cache and a call to the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.attention import AttentionLayer, KVKind
from fwk.layers.select_tokens import SelectTokens

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch


class Attention:
    """Causal attention over the paged past. Head counts are this rank's (``QKVLinear`` knows them).

    With ``kind=KVKind.LATENT`` the cache keeps only k, and its first ``value_head_size`` numbers are the value.
    ``index`` is given by models that narrow (``Model.prunes_last_layer``): its decoder layer's place among all.
    """

    def __init__(  # noqa: PLR0913 - what sets attention layers apart, each by its name
        self,
        context: ModelContext,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_size: int | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        value_head_size: int | None = None,
        kind: KVKind = KVKind.FULL,
        index: int | None = None,
    ) -> None:
        size = context.config.head_size if head_size is None else head_size
        self.wanted = None if index is None else SelectTokens(context, index)
        self.backend = context.attention
        self.layer = AttentionLayer(
            index=len(context.attention_layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=size,
            scale=size**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            value_head_size=size if value_head_size is None else value_head_size,
            kind=kind,
            is_pruned=self.wanted is not None and self.wanted.is_last,
        )
        context.attention_layers.append(self.layer)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> Tensor:
        """q: [num_tokens, num_heads, head_size]; k, v: [num_tokens, num_kv_heads, head_size], k rotated.

        v is None in a latent layer. Returns [num_tokens, num_heads * value_head_size], in the last layer of a model
        that prunes_last_layer only the rows of ``batch.hidden_indices``.
        """
        out = self.backend.forward(q, k, v, self.layer, batch).reshape(q.shape[0], -1)
        return out if self.wanted is None else self.wanted(out, batch)
