"""Index tensors and masks of one step, computed once and shared by all layers of one kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fwk_attention.torch_sdpa.attend import fused_mask, prefers_fused

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.attention import AttentionLayer
    from fwk.types import ForwardBatch

MAX_SHORT = 16
"""New tokens up to which a sequence is computed together with others (decoding, verifying drafts)."""

QUERY_BLOCK = 128
"""Queries of a chunk computed at once: few enough that hidden keys cost little and scores stay in the cache."""

SPLIT_SAVES = 1024
"""Padded tokens that a further bucket must save: what its dozen kernel launches cost (measured: 50 us)."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers alike in this share one plan."""

    kv_group: int
    num_heads: int
    num_kv_heads: int
    sliding_window: int | None

    @staticmethod
    def of(layer: AttentionLayer) -> LayerKind:
        return LayerKind(layer.kv_group, layer.num_heads, layer.num_kv_heads, layer.sliding_window)


@dataclass(slots=True)
class Bucket:
    """Sequences with few new tokens and a past of similar length, computed as one padded batch."""

    tokens: Tensor | None  # [num_seqs * num_new] int64: their tokens in the batch; None: all of it, in order
    num_seqs: int
    num_new: int
    rows: Tensor  # [2 * num_seqs * num_kv_heads * num_blocks] int64: rows of the cache, K then V
    length: int  # tokens per sequence in those rows
    is_fused: bool  # which of the two ways of ``attend``
    mask: Tensor  # in the form that way wants


@dataclass(slots=True)
class QueryBlock:
    """A stretch of a chunk's queries and the stretch of its keys that any of them sees."""

    start: int
    stop: int  # of the chunk's queries
    first_key: int
    last_key: int  # of the chunk's keys, exclusive
    is_fused: bool
    mask: Tensor


@dataclass(slots=True)
class Chunk:
    """Many new tokens of one sequence."""

    start: int
    stop: int  # of its tokens in the batch
    rows: Tensor | None  # [2 * num_kv_heads * num_blocks] int64; None: nothing came before, so fresh k and v are all
    blocks: list[QueryBlock] | None  # None: plainly causal, for the fused kernel


@dataclass(slots=True)
class KindPlan:
    """What ``forward`` needs for one kind of layer."""

    key_rows: Tensor  # [num_tokens, num_kv_heads] int64: rows of the cache, one per token and head
    value_rows: Tensor
    fresh_rows: Tensor | None  # rows (blocks of heads) of blocks whose first slot is written in this step
    buckets: list[Bucket]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the plan of one kind of layer. The cache is [num_blocks, 2, num_kv_heads, block_size, head_size]."""

    kind: LayerKind
    block_size: int
    dtype: torch.dtype
    device: torch.device
    fuses_causal: bool  # chunks that nothing precedes go to torch's fused kernel

    def plan(self, batch: ForwardBatch) -> KindPlan:
        group = batch.kv_groups[self.kind.kv_group]
        starts = batch.query_start_np.astype(np.int64)
        num_new = np.diff(starts)
        seq_lens = batch.seq_lens_np.astype(np.int64)
        table = group.block_table_np.astype(np.int64)
        key_rows, value_rows, fresh_rows = self._store_rows(group.slot_mapping_np)
        is_short = num_new <= MAX_SHORT
        buckets: list[Bucket] = []
        for chosen in (np.flatnonzero(num_new == 1), np.flatnonzero(is_short & (num_new > 1))):
            for places in split(chosen, seq_lens):
                is_all = batch.is_decode and len(places) == len(seq_lens)
                buckets.append(self._bucket(places, starts[places], num_new[places], seq_lens[places], table, is_all))
        chunks = [
            self._chunk(int(starts[i]), int(starts[i + 1]), int(seq_lens[i]), table[i])
            for i in np.flatnonzero(~is_short)
        ]
        return KindPlan(key_rows, value_rows, fresh_rows, buckets, chunks)

    def _store_rows(self, slots: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of [num_blocks * 2 * num_kv_heads * block_size, head_size] for K and V, and rows to clear first."""
        heads, size = self.kind.num_kv_heads, self.block_size
        blocks, offsets = np.divmod(slots, size)
        head = np.arange(heads)
        keys = ((blocks * 2 * heads)[:, None] + head) * size + offsets[:, None]
        fresh = blocks[offsets == 0]
        fresh_rows = None
        if len(fresh):
            fresh_rows = self._tensor(((fresh * 2 * heads)[:, None] + np.arange(2 * heads)).ravel())
        return self._tensor(keys), self._tensor(keys + heads * size), fresh_rows

    def _gather_rows(self, table: Any) -> Tensor:
        """Rows of [num_blocks * 2 * num_kv_heads, block_size * head_size] for block ids [num_seqs, num_blocks]."""
        heads = self.kind.num_kv_heads
        rows = (table * 2 * heads)[None, :, None, :] + np.arange(2 * heads).reshape(2, 1, heads, 1)
        return self._tensor(rows.ravel())

    def _bucket(self, places: Any, starts: Any, num_new: Any, seq_lens: Any, table: Any, is_all: bool) -> Bucket:
        new = int(num_new.max())
        # Sequences with fewer new tokens repeat their last one: computed twice, with the same outcome.
        offsets = np.minimum(np.arange(new), num_new[:, None] - 1)
        positions = (seq_lens - num_new)[:, None] + offsets
        first = self._first_block(positions[:, 0])
        num_blocks = -(-seq_lens // self.block_size) - first
        columns = np.arange(int(num_blocks.max()))
        # Padding points at a block of the sequence itself: never at numbers of somebody else.
        columns = first[:, None] + np.where(columns < num_blocks[:, None], columns, 0)
        length = columns.shape[1] * self.block_size
        key_positions = (first * self.block_size)[:, None] + np.arange(length)
        return Bucket(
            tokens=None if is_all else self._tensor((starts[:, None] + offsets).ravel()),
            num_seqs=len(places),
            num_new=new,
            rows=self._gather_rows(table[places[:, None], columns]),
            length=length,
            **self._masked(positions, key_positions),
        )

    def _chunk(self, start: int, stop: int, seq_len: int, table: Any) -> Chunk:
        window = self.kind.sliding_window
        past = seq_len - (stop - start)
        if past == 0:
            if self.fuses_causal and (window is None or seq_len <= window):
                return Chunk(start, stop, None, None)
            return Chunk(start, stop, None, self._query_blocks(0, seq_len, 0))
        first = int(self._first_block(np.array([past]))[0])
        rows = self._gather_rows(table[None, first : -(-seq_len // self.block_size)])
        return Chunk(start, stop, rows, self._query_blocks(past, seq_len, first * self.block_size))

    def _query_blocks(self, past: int, seq_len: int, offset: int) -> list[QueryBlock]:
        """Cut the positions from ``past`` on; keys are counted from position ``offset``."""
        window = self.kind.sliding_window
        blocks: list[QueryBlock] = []
        for start in range(past, seq_len, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, seq_len)
            first = offset if window is None else max(offset, start - window + 1)
            masked = self._masked(np.arange(start, stop)[None], np.arange(first, stop)[None])
            blocks.append(QueryBlock(start - past, stop - past, first - offset, stop - offset, **masked))
        return blocks

    def _first_block(self, positions: Any) -> Any:
        """The first block that tokens at ``positions`` see."""
        if self.kind.sliding_window is None:
            return np.zeros_like(positions)
        return np.maximum(positions - self.kind.sliding_window + 1, 0) // self.block_size

    def _masked(self, positions: Any, key_positions: Any) -> dict[str, Any]:
        """The way to compute these [n, num_queries] queries and [n, num_keys] keys, with its mask."""
        is_fused = prefers_fused(self.device, positions.size * key_positions.shape[1])
        mask = self._mask(positions, key_positions)
        group = self.kind.num_heads // self.kind.num_kv_heads
        return {"is_fused": is_fused, "mask": fused_mask(mask, group) if is_fused else mask}

    def _mask(self, positions: Any, key_positions: Any) -> Tensor:
        """[n, num_queries] and [n, num_keys] to 0 where a query sees a key, else -inf: [n, num_queries, num_keys]."""
        query = self._tensor(positions).unsqueeze(-1)
        key = self._tensor(key_positions).unsqueeze(1)
        is_hidden = key > query
        if self.kind.sliding_window is not None:
            is_hidden |= key <= query - self.kind.sliding_window
        mask = torch.zeros(is_hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(is_hidden, float("-inf"))

    def _tensor(self, x: Any) -> Tensor:
        return torch.from_numpy(x).to(self.device, non_blocking=True)


def split(places: Any, seq_lens: Any) -> list[Any]:
    """Put sequences into as few groups of similar length as padding allows; places stay in order when one suffices."""
    if len(places) == 0:
        return []
    order = places[np.argsort(seq_lens[places], kind="stable")]
    lens = seq_lens[order]
    at = np.arange(1, len(lens))
    saved = at * (lens[-1] - lens[:-1]) if len(lens) > 1 else np.zeros(1, np.int64)
    best = int(saved.argmax())
    if saved[best] < SPLIT_SAVES:
        return [places]
    return split(np.sort(order[: best + 1]), seq_lens) + split(np.sort(order[best + 1 :]), seq_lens)
