"""Gather the past of each sequence into one padded tensor, then multiply.

A layer's cache is [num_blocks, parts, num_kv_heads, block_size, row_size]: within a block the tokens of a head stand
together, so that gathering copies rows of 1 KB and more and its outcome needs no transposition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVKind, KVSpec
from fwk_attention._common.rows import PlainRows, block_format, move_rows, rows_of
from fwk_attention.torch_sdpa.attend import explicit, fused, products
from fwk_attention.torch_sdpa.masks import LayerKind
from fwk_attention.torch_sdpa.plan import Bucket, Chunk, KindPlan, Planner, QueryBlock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.types import ForwardBatch


class TorchBackend(AttentionBackend):
    """Paged attention in plain torch."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._rows = rows_of(context)
        self._is_plain = isinstance(self._rows, PlainRows)
        self._gathered = torch.empty(0, dtype=self._rows.dtype, device=context.device)  # reused by every layer
        # torch's fused kernel for CPUs is quick where it has matrix tiles; elsewhere in half precision it takes 1.4
        # times as long as separate products.
        has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        self._fuses_causal = context.device.type != "cpu" or context.dtype == torch.float32 or has_tiles

    def block_format(self, spec: KVSpec) -> BlockFormat:
        return block_format(spec, self.context.block_size, self._rows)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> dict[LayerKind, KindPlan]:
        context = self.context
        plans: dict[LayerKind, KindPlan] = {}
        for layer in layers:
            if layer.state is None:
                layer.state = LayerKind.of(layer)
            if layer.state not in plans:
                planner = Planner(
                    layer.state, context.block_size, context.dtype, context.device, context.send, self._fuses_causal
                )
                plans[layer.state] = planner.plan(batch)
        return plans

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        plan: KindPlan = batch.plan[layer.state]
        cache = layer.kv_cache
        assert cache is not None, "forward before the KV cache was allocated"
        num_rows, row_size = cache.shape[-2:]
        if plan.fresh_rows is not None:
            # A block is cleared when its first slot is written: what an earlier owner left behind (NaN, perhaps) is
            # masked, but zero times NaN would still be NaN.
            cache.view(-1, num_rows * row_size).index_fill_(0, plan.fresh_rows, 0)
        rows = cache.view(-1, row_size)
        k = self._store(k, rows, plan.key_rows)
        v = k[..., : layer.value_head_size] if v is None else self._store(v, rows, plan.value_rows)
        if len(plan.buckets) == 1 and plan.buckets[0].tokens is None:
            return self._attend_bucket(q, cache, layer, plan.buckets[0])
        out = torch.empty((*q.shape[:2], layer.value_head_size), dtype=q.dtype, device=q.device)
        for bucket in plan.buckets:
            out[bucket.tokens] = self._attend_bucket(q[bucket.tokens], cache, layer, bucket)
        for chunk in plan.chunks:
            tokens = slice(chunk.start, chunk.stop)
            self._attend_chunk(q[tokens], k[tokens], v[tokens], cache, layer, chunk, out[tokens])
        return out

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        move_rows(layers, source, target)

    def _store(self, x: Tensor, rows: Tensor, at: Tensor | None) -> Tensor:
        """Write K or V of all new tokens; returns it as it will be read."""
        stored = self._rows.encode(x)
        rows[at] = stored
        return x if self._is_plain else self._rows.decode(stored, x.shape[-1])

    def _gather(
        self, cache: Tensor, rows: Tensor, count: int, length: int, layer: AttentionLayer
    ) -> tuple[Tensor, Tensor]:
        """K and V of ``count`` sequences, [count, num_kv_heads, length, size] each.

        They lie in a buffer that the next call overwrites.
        """
        block_size, row_size = cache.shape[-2:]
        num_blocks, width = rows.shape[0], block_size * row_size
        if self._gathered.numel() < num_blocks * width:
            self._gathered = torch.empty(num_blocks * width * 5 // 4, dtype=cache.dtype, device=cache.device)
        out = self._gathered[: num_blocks * width].view(num_blocks, width)
        found = torch.index_select(cache.view(-1, width), 0, rows, out=out)
        if layer.kind is KVKind.LATENT:
            k = self._rows.decode(found.view(count, 1, length, row_size), layer.head_size)
            return k, k[..., : layer.value_head_size]
        k, v = self._rows.decode(found.view(2, count, layer.num_kv_heads, length, row_size), layer.head_size)
        return k, v

    def _attend_bucket(self, q: Tensor, cache: Tensor, layer: AttentionLayer, bucket: Bucket) -> Tensor:
        """q: [num_seqs * num_new, num_heads, head_size] to the same."""
        k, v = self._gather(cache, bucket.rows, bucket.num_seqs, bucket.length, layer)
        queries = q.view(bucket.num_seqs, bucket.num_new, layer.num_kv_heads, -1, layer.head_size)
        out = _attend(queries, k, v, bucket, layer)
        return out.reshape(q.shape[0], layer.num_heads, layer.value_head_size)

    def _attend_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, layer: AttentionLayer, chunk: Chunk, out: Tensor
    ) -> None:
        """q, out: [num_new, num_heads, head_size]; k, v: [num_new, num_kv_heads, head_size]."""
        heads = layer.num_kv_heads
        if chunk.rows is None:
            keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        else:
            length = chunk.rows.shape[0] // (cache.shape[1] * heads) * cache.shape[3]
            keys, values = self._gather(cache, chunk.rows, 1, length, layer)
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
            seen, asked = slice(block.first_key, block.last_key), slice(block.start, block.stop)
            outputs[:, asked] = _attend(queries[:, asked], keys[:, :, seen], values[:, :, seen], block, layer)


def _attend(q: Tensor, k: Tensor, v: Tensor, part: Bucket | QueryBlock, layer: AttentionLayer) -> Tensor:
    if layer.state.is_explicit:
        return explicit(q, k, v, part.mask, part.distance, layer)
    return (fused if part.is_fused else products)(q, k, v, part.mask, layer.scale)
