"""A model's attention layer: a place in the KV cache and a call to the backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.attention import AttentionLayer, KVKind, Turn
from fwk_layers.select_tokens import SelectTokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch
    from fwk_layers.norm import QKNorm
    from fwk_layers.rope import RotaryEmbedding, RotaryRows


_STATIC_SCALES = {
    "k": ("k_scale", "k_proj.k_scale", "attn.k_scale"),
    "v": ("v_scale", "v_proj.v_scale", "attn.v_scale"),
    "q": ("q_scale",),
}
"""Where checkpoints keep the scales of a KV cache that is quantised by constants, below the layer's name."""


class Attention:
    """Causal attention over the paged past. Head counts are this rank's (``QKVLinear`` knows them).

    With ``kind=KVKind.LATENT`` the cache keeps only k, and its first ``value_head_size`` numbers are the value.
    ``extras`` and ``needs`` are those of ``AttentionLayer``. ``prefix`` is the layer's name in the checkpoint, below
    which static scales of a quantised KV cache are read.
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
        extras: Mapping[str, Tensor] | None = None,
        needs: frozenset[str] = frozenset(),
        prefix: str = "",
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
            extras=extras or {},
            needs=needs,
            prefix=prefix,
        )
        if prefix:
            self.layer.k_scale, self.layer.v_scale, _ = (_scale(context, prefix, of) for of in _STATIC_SCALES)
        context.attention_layers.append(self.layer)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """q: [num_tokens, num_heads, head_size]; k, v: [num_tokens, num_kv_heads, head_size], k rotated.

        v is None in a latent layer. Returns [num_tokens, num_heads * value_head_size], in the last layer of a model
        that prunes_last_layer only the rows of ``batch.hidden_indices``. extra: tensors of this step that the layer's
        ``needs`` announced.
        """
        forward = self.backend.forward
        out = forward(q, k, v, self.layer, batch) if extra is None else forward(q, k, v, self.layer, batch, extra)
        out = out.reshape(q.shape[0], -1)
        return out if self.wanted is None else self.wanted(out, batch)

    def turned(
        self, qkv: Tensor, rotary: RotaryEmbedding, rows: RotaryRows, batch: ForwardBatch, norm: QKNorm | None = None
    ) -> Tensor:
        """As a call, of queries, keys and values side by side, the former two still to be normalised and rotated.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_size]; it may be changed.
        """
        heads, kv_heads = self.layer.num_heads, self.layer.num_kv_heads
        if self.backend.turns and rotary.is_whole:
            turn = Turn(*rows) if norm is None else Turn(*rows, norm.norm.weight, norm.norm.eps, norm.norm.rounds_last)
            out = self.backend.forward_turned(qkv, self.layer, batch, turn).reshape(qkv.shape[0], -1)
            return out if self.wanted is None else self.wanted(out, batch)
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        q, k = rotary.rotate(qk if norm is None else norm(qk), rows).split((heads, kv_heads), dim=1)
        return self(q, k, v, batch)


def _scale(context: ModelContext, prefix: str, of: str) -> float | None:
    """The largest that the checkpoint gives for K, V or the queries, so that no head's numbers are cut off."""
    found = [name for name in (f"{prefix}.{name}" for name in _STATIC_SCALES[of]) if context.weights.has(name)]
    scales = [float(context.weights.raw(name).max()) for name in found]
    for name, scale in zip(found, scales, strict=True):
        if not 0 < scale < math.inf:
            raise ModelLoadError(f"{name}: the scale of a KV cache is a positive number, not {scale}")
    return max(scales, default=None)
