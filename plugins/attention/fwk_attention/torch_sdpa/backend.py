"""Gather the past of each sequence into one padded tensor, then multiply.

A layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_size]: within a block the tokens of a head stand
together, so that gathering copies rows of 1 KB and more and its outcome needs no transposition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVSpec
from fwk_attention.torch_sdpa.attend import fused, products
from fwk_attention.torch_sdpa.plan import Bucket, Chunk, KindPlan, LayerKind, Planner

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class TorchBackend(AttentionBackend):
    """Paged attention in plain torch."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._gathered = torch.empty(0, dtype=context.kv_dtype, device=context.device)  # reused by every layer
        # torch's fused kernel for CPUs is quick where it has matrix tiles; elsewhere in half precision it takes 1.4
        # times as long as separate products.
        has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        self._fuses_causal = context.device.type != "cpu" or context.dtype == torch.float32 or has_tiles

    def block_format(self, spec: KVSpec) -> BlockFormat:
        shape = (2, spec.num_kv_heads, self.context.block_size, spec.head_size)
        return BlockFormat(shape, self.context.kv_dtype)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> dict[LayerKind, KindPlan]:
        context = self.context
        plans: dict[LayerKind, KindPlan] = {}
        for layer in layers:
            if layer.state is None:
                layer.state = LayerKind.of(layer)
            if layer.state not in plans:
                planner = Planner(layer.state, context.block_size, context.dtype, context.device, self._fuses_causal)
                plans[layer.state] = planner.plan(batch)
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
            self._attend_chunk(q[tokens], k[tokens], v[tokens], cache, layer, chunk, out[tokens])
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
        count, heads, size = bucket.num_seqs, layer.num_kv_heads, layer.head_size
        k, v = self._gather(cache, bucket.rows).view(2, count, heads, bucket.length, size)
        queries = q.view(count, bucket.num_new, heads, -1, size)
        attend = fused if bucket.is_fused else products
        return attend(queries, k, v, bucket.mask, layer.scale).reshape(q.shape)

    def _attend_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, layer: AttentionLayer, chunk: Chunk, out: Tensor
    ) -> None:
        """q, out: [num_new, num_heads, head_size]; k, v: [num_new, num_kv_heads, head_size]."""
        heads, size = layer.num_kv_heads, layer.head_size
        if chunk.rows is None:
            keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        else:
            keys, values = self._gather(cache, chunk.rows).view(2, 1, heads, -1, size)
        if chunk.blocks is None:
            queries = q.transpose(0, 1).unsqueeze(0)
            causal = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=layer.scale, enable_gqa=layer.num_heads != heads
            )
            out.copy_(causal[0].transpose(0, 1))
            return
        queries, outputs = q.unflatten(1, (heads, -1)).unsqueeze(0), out.unflatten(1, (heads, -1)).unsqueeze(0)
        keys, values = keys.contiguous(), values.contiguous()
        for block in chunk.blocks:
            seen = slice(block.first_key, block.last_key)
            asked = slice(block.start, block.stop)
            attend = fused if block.is_fused else products
            outputs[:, asked] = attend(queries[:, asked], keys[:, :, seen], values[:, :, seen], block.mask, layer.scale)


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
