"""Paged attention, one sequence after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.interfaces.attention import AttentionBackend, AttentionLayer, BlockFormat, KVSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.types import ForwardBatch


class MineAttention(AttentionBackend):
    """Gathers each sequence's keys and values and attends in float32."""

    def block_format(self, spec: KVSpec) -> BlockFormat:
        shape = (2, self.context.block_size, spec.num_kv_heads, spec.head_size)
        return BlockFormat(shape, self.context.dtype, head_dim=2)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> list[tuple[slice, Tensor]]:
        """For each sequence its tokens in the batch, and the slots of all its tokens in the cache."""
        size = self.context.block_size
        sequences: list[tuple[slice, Tensor]] = []
        table = batch.kv_groups[0].block_table.long()
        for row in range(batch.num_seqs):
            places = torch.arange(int(batch.seq_lens_np[row]), device=table.device)
            tokens = slice(int(batch.query_start_np[row]), int(batch.query_start_np[row + 1]))
            sequences.append((tokens, table[row, places // size] * size + places % size))
        return sequences

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
        cache[slots // size, 0, slots % size] = k  # all of the batch is stored before any is read
        cache[slots // size, 1, slots % size] = v
        out = torch.empty_like(q)
        for tokens, slots in batch.plan:
            keys, values = (cache[slots // size, part, slots % size].float() for part in (0, 1))
            out[tokens] = self._attend(q[tokens].float(), keys, values, layer).to(q.dtype)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """q: [new, heads, size], the last of the tokens of k and v: [all, kv_heads, size]."""
        new, total = len(q), len(k)
        group = layer.num_heads // layer.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        behind = torch.arange(total - new, total)[:, None] - torch.arange(total)  # how far a key is behind a query
        hidden = behind < 0
        if layer.sliding_window is not None:
            hidden |= behind >= layer.sliding_window
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
