"""Gather the past of each sequence into one padded tensor, then multiply.

A layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_size]: within a block the tokens of a head stand
together, so that gathering copies rows of 1 KB and more and its outcome needs no transposition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVSpec
from fwk_attention.torch_sdpa.plan import Bucket, Chunk, KindPlan, LayerKind, Planner

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

MAX_FUSED = 512
"""Keys times new tokens up to which torch's fused kernel beats five separate ones (measured: 31 against 66 us)."""


class TorchBackend(AttentionBackend):
    """Paged attention in plain torch."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._gathered = torch.empty(0, dtype=context.kv_dtype, device=context.device)  # reused by every layer

    def block_format(self, spec: KVSpec) -> BlockFormat:
        shape = (2, spec.num_kv_heads, self.context.block_size, spec.head_size)
        return BlockFormat(shape, self.context.kv_dtype)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> dict[LayerKind, KindPlan]:
        context = self.context
        plans: dict[LayerKind, KindPlan] = {}
        for layer in layers:
            kind = LayerKind.of(layer)
            if kind not in plans:
                plans[kind] = Planner(kind, context.block_size, context.dtype, context.device).plan(batch)
            layer.state = kind
        return plans

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        plan: KindPlan = batch.plan[layer.state]
        cache = layer.kv_cache
        assert cache is not None, "forward before the KV cache was allocated"
        _store(k, v, cache, plan)
        if len(plan.buckets) == 1 and plan.buckets[0].tokens is None:
            return self._attend_bucket(q, cache, layer, plan.buckets[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for bucket in plan.buckets:
            out[bucket.tokens] = self._attend_bucket(q[bucket.tokens], cache, layer, bucket)
        for chunk in plan.chunks:
            tokens = slice(chunk.start, chunk.stop)
            out[tokens] = self._attend_chunk(q[tokens], k[tokens], v[tokens], cache, layer, chunk)
        return out

    def _gather(self, cache: Tensor, rows: Tensor) -> Tensor:
        """Rows of blocks, one after another: [len(rows), block_size * head_size]."""
        source = cache.view(-1, cache.shape[-2] * cache.shape[-1])
        size = rows.shape[0] * source.shape[1]
        if self._gathered.numel() < size:
            self._gathered = torch.empty(size + size // 4, dtype=cache.dtype, device=cache.device)
        return torch.index_select(source, 0, rows, out=self._gathered[:size].view(rows.shape[0], -1))

    def _attend_bucket(self, q: Tensor, cache: Tensor, layer: AttentionLayer, bucket: Bucket) -> Tensor:
        """q: [num_seqs * num_new, num_heads, head_size] to the same."""
        count, new, heads, size = bucket.num_seqs, bucket.num_new, layer.num_kv_heads, layer.head_size
        k, v = self._gather(cache, bucket.rows).view(2, count, heads, bucket.length, size)
        # Query heads that share a KV head become further queries of it, so K and V need no repeating.
        folded = q.view(count, new, heads, -1, size).transpose(1, 2).reshape(count, heads, -1, size)
        if q.device.type != "cpu" or count * bucket.length * new <= MAX_FUSED:
            mask = bucket.mask.expand(count, 1, folded.shape[2], bucket.length)
            out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=layer.scale)
        else:
            out = attend(folded, k, v, bucket.mask, layer.scale)
        return out.view(count, heads, new, -1, size).transpose(1, 2).reshape(q.shape)

    def _attend_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, layer: AttentionLayer, chunk: Chunk
    ) -> Tensor:
        """q: [num_new, num_heads, head_size] to the same."""
        if chunk.rows is None:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
        else:
            keys, values = self._gather(cache, chunk.rows).view(2, layer.num_kv_heads, -1, layer.head_size)
            keys, values = keys[:, : chunk.length], values[:, : chunk.length]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=layer.scale,
            enable_gqa=layer.num_heads != layer.num_kv_heads,
        )
        return out[0].transpose(0, 1)


def _store(k: Tensor, v: Tensor, cache: Tensor, plan: KindPlan) -> None:
    """Write K and V of all new tokens.

    A block is cleared when its first slot is written: what an earlier owner left behind (NaN, perhaps) is masked,
    but zero times NaN would still be NaN.
    """
    if plan.fresh_rows is not None:
        cache.view(-1, cache.shape[-2] * cache.shape[-1]).index_fill_(0, plan.fresh_rows, 0)
    rows = cache.view(-1, cache.shape[-1])
    rows[plan.key_rows] = k.to(cache.dtype)
    rows[plan.value_rows] = v.to(cache.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v by batched products; for few queries faster than torch's fused kernel on a CPU.

    q: [n, heads, num_queries, head_size]; k, v: [n, heads, num_keys, head_size]; mask: [n, 1, num_queries or 1,
    num_keys]. Returns q's shape.

    Half-precision products are rounded to 8 bits, which would spoil large scores. So scores are computed twice:
    roughly, for a bound c near each row's largest; then less c, inside the product's float32 accumulator. Scores
    that matter are now near zero, where rounding does no harm.
    """
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    keys = k.transpose(1, 2)
    if q.dtype == torch.float32:
        offset = mask.expand(shape)
    else:
        bound = torch.bmm(q, keys).amax(-1, keepdim=True).mul_(scale)
        offset = mask - bound.view(*shape[:3], 1)
    scores = torch.baddbmm(offset.reshape(-1, *shape[2:]), q, keys, alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), v).view(*shape[:3], -1)
