"""Attention whose softmax is corrected tile by tile (Milakov and Gimelshein 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk.interfaces.attention import AttentionBackend, AttentionLayer, BlockFormat, KVSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a step."""

    tokens: slice  # its new tokens in the batch
    slots: Tensor  # [length] int64: where all its tokens are stored
    positions: Tensor  # [length] int64: depths, of all its tokens
    seen: Tensor | None  # [new, new] bool: which of the new tokens see which; None: those before them


class TiledAttention(AttentionBackend):
    """K and V of a slot lie next to each other: blocks of [2, block_size, num_kv_heads, head_size]."""

    def block_format(self, spec: KVSpec) -> BlockFormat:
        shape = (2, self.context.block_size, spec.num_kv_heads, spec.head_size)
        return BlockFormat(shape, self.context.dtype, head_dim=2)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> list[Part]:
        size, table = self.context.block_size, batch.kv_groups[0].block_table.long()
        parts: list[Part] = []
        for row in range(batch.num_seqs):
            start, end = int(batch.query_start_np[row]), int(batch.query_start_np[row + 1])
            places = torch.arange(int(batch.seq_lens_np[row]), device=table.device)
            slots = table[row, places // size] * size + places % size
            new = end - start
            positions = torch.cat([places[: len(places) - new], batch.positions[start:end]])
            seen = None if batch.tree_mask is None else batch.tree_mask[start:end, :new]
            parts.append(Part(slice(start, end), slots, positions, seen))
        return parts

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        size, cache = self.context.block_size, layer.kv_cache
        assert cache is not None
        assert v is not None
        slots = batch.kv_groups[layer.kv_group].slot_mapping
        cache[slots // size, 0, slots % size] = k
        cache[slots // size, 1, slots % size] = v
        out = torch.empty_like(q)
        for part in batch.plan:
            out[part.tokens] = self._attend(q[part.tokens].float(), cache, layer, part).to(q.dtype)
        return out

    def _attend(self, q: Tensor, cache: Tensor, layer: AttentionLayer, part: Part) -> Tensor:
        """q: [new, heads, size] to the same."""
        size, group = self.context.block_size, layer.num_heads // layer.num_kv_heads
        q = q.unflatten(1, (layer.num_kv_heads, group)).permute(1, 2, 0, 3) * layer.scale  # [kv, group, new, size]
        most = q.new_full(q.shape[:-1], float("-inf"))
        total, out = torch.zeros_like(most), torch.zeros_like(q)
        tile = self.context.options.tiled_keys
        for start in range(0, len(part.slots), tile):
            slots = part.slots[start : start + tile]
            keys, values = (cache[slots // size, i, slots % size].float().transpose(0, 1) for i in (0, 1))
            scores = torch.einsum("hgnd,hmd->hgnm", q, keys)
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            hidden = ~self._visible(part, start, start + len(slots), layer.sliding_window)
            scores = scores.masked_fill(hidden, float("-inf"))
            largest = torch.maximum(most, scores.amax(-1))
            base = torch.where(largest == float("-inf"), 0.0, largest)  # a tile nobody sees
            weights, keep = (scores - base[..., None]).exp(), (most - base).exp()
            total = total * keep + weights.sum(-1)
            seen_values = values.masked_fill(hidden.all(0)[None, :, None], 0.0)  # what nobody sees may be anything
            out = out * keep[..., None] + torch.einsum("hgnm,hmd->hgnd", weights, seen_values)
            most = largest
        return (out / total[..., None]).permute(2, 0, 1, 3).flatten(1, 2)

    def _visible(self, part: Part, start: int, end: int, window: int | None) -> Tensor:
        """[new, end - start] bool: which new tokens see which of the keys from start to end."""
        new, length = part.tokens.stop - part.tokens.start, len(part.slots)
        past, places = length - new, torch.arange(start, end, device=part.slots.device)
        if part.seen is None:
            visible = places <= torch.arange(past, length, device=places.device)[:, None]
        else:
            inside = part.seen[:, (places - past).clamp(min=0)]
            visible = (places < past) | inside
        if window is not None:
            visible = visible & (part.positions[start:end] > part.positions[past:, None] - window)
        return visible

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        size = self.context.block_size
        for layer in layers:
            assert layer.kv_cache is not None
            rows = layer.kv_cache[source // size, :, source % size]  # a copy: a slot may be source and target
            layer.kv_cache[target // size, :, target % size] = rows
