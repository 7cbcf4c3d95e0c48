"""Index tensors and masks of one step, computed once and shared by all layers of one kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fwk_attention.torch_sdpa.masks import LayerKind, Masks, Queries

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.device import Upload
    from fwk.types import ForwardBatch

MAX_SHORT = 16
"""New tokens up to which a sequence is computed together with others (decoding, verifying drafts)."""

QUERY_BLOCK = 128
"""Queries of a chunk computed at once: few enough that hidden keys cost little and scores stay in the cache."""

SPLIT_SAVES = 1024
"""Padded tokens that a further bucket must save: what its dozen kernel launches cost (measured: 50 us)."""


@dataclass(slots=True)
class Bucket:
    """Sequences with few new tokens and a past of similar length, computed as one padded batch."""

    tokens: Tensor | None  # [num_seqs * num_new] int64: their tokens in the batch; None: all of it, in order
    num_seqs: int
    num_new: int
    rows: Tensor  # [parts * num_seqs * num_kv_heads * num_blocks] int64: blocks of a head, K then V
    length: int  # tokens per sequence in those rows
    is_fused: bool  # which of the two ways of ``attend``
    mask: Tensor  # in the form that way wants
    distance: Tensor | None  # [num_seqs, num_new, length] float32: position of the key less the query's, for biases


@dataclass(slots=True)
class QueryBlock:
    """A stretch of a chunk's queries and the stretch of its keys that any of them sees."""

    start: int
    stop: int  # of the chunk's queries
    first_key: int
    last_key: int  # of the chunk's keys, exclusive
    is_fused: bool
    mask: Tensor
    distance: Tensor | None


@dataclass(slots=True)
class Chunk:
    """Many new tokens of one sequence."""

    start: int
    stop: int  # of its tokens in the batch
    rows: Tensor | None  # [parts * num_kv_heads * num_blocks] int64; None: nothing came before, fresh k and v are all
    blocks: list[QueryBlock] | None  # None: plainly causal, for the fused kernel


@dataclass(slots=True)
class KindPlan:
    """What ``forward`` needs for one kind of layer."""

    key_rows: Tensor  # [num_tokens, num_kv_heads] int64: rows of the cache, one per token and head
    value_rows: Tensor | None  # None in a latent layer
    fresh_rows: Tensor | None  # rows (blocks of heads) of blocks whose first slot is written in this step
    buckets: list[Bucket]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the plan of one kind of layer. The cache is [num_blocks, parts, num_kv_heads, block_size, row_size]."""

    kind: LayerKind
    block_size: int
    dtype: torch.dtype
    device: torch.device
    send: Upload
    fuses_causal: bool  # chunks that nothing precedes go to torch's fused kernel

    def plan(self, batch: ForwardBatch) -> KindPlan:
        group = batch.kv_groups[self.kind.kv_group]
        masks = Masks(batch, self.kind, self.dtype, self.device, self.send)
        starts = batch.query_start_np.astype(np.int64)
        num_new = np.diff(starts)
        seq_lens = batch.seq_lens_np.astype(np.int64)
        table = group.block_table_np.astype(np.int64)
        key_rows, value_rows, fresh_rows = self._store_rows(group.slot_mapping_np)
        is_short = num_new <= MAX_SHORT
        buckets: list[Bucket] = []
        if self.kind.is_cross:
            buckets = self._cross_buckets(starts, num_new, seq_lens, table, masks, is_decode=batch.is_decode)
            return KindPlan(key_rows, value_rows, fresh_rows, buckets, [])
        for chosen in (np.flatnonzero(num_new == 1), np.flatnonzero(is_short & (num_new > 1))):
            for places in split(chosen, seq_lens):
                is_all = batch.is_decode and len(places) == len(seq_lens)
                lens, new = seq_lens[places], num_new[places]
                # Sequences with fewer new tokens repeat their last one: computed twice, with the same outcome.
                offsets = np.minimum(np.arange(int(new.max())), new[:, None] - 1)
                queries = Queries(starts[places], lens - new, new, offsets)
                buckets.append(self._bucket(queries, lens, table[places], masks, is_all))
        chunks = [
            self._chunk(int(starts[i]), int(starts[i + 1]), int(seq_lens[i]), table[i], masks)
            for i in np.flatnonzero(~is_short)
        ]
        return KindPlan(key_rows, value_rows, fresh_rows, buckets, chunks)

    def _cross_buckets(
        self, starts: Any, num_new: Any, seq_lens: Any, table: Any, masks: Masks, *, is_decode: bool
    ) -> list[Bucket]:
        """Sequences with as many queries together."""
        buckets: list[Bucket] = []
        for count in np.unique(num_new):
            for places in split(np.flatnonzero(num_new == count), seq_lens):
                offsets = np.broadcast_to(np.arange(count), (len(places), count))
                queries = Queries(starts[places], seq_lens[places], num_new[places], offsets, is_cross=True)
                is_all = is_decode and len(places) == len(seq_lens)
                buckets.append(self._bucket(queries, seq_lens[places], table[places], masks, is_all))
        return buckets

    def _store_rows(self, slots: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows of [num_blocks * parts * num_kv_heads * block_size, row_size] for K and V, and rows to clear first."""
        heads, size = self.kind.num_kv_heads, self.block_size
        all_heads = self.kind.parts * heads
        blocks, offsets = np.divmod(slots, size)
        head = np.arange(heads)
        keys = ((blocks * all_heads)[:, None] + head) * size + offsets[:, None]
        values = self._tensor(keys + heads * size) if self.kind.parts == 2 else None
        fresh = blocks[offsets == 0]
        fresh_rows = None
        if len(fresh):
            fresh_rows = self._tensor(((fresh * all_heads)[:, None] + np.arange(all_heads)).ravel())
        return self._tensor(keys), values, fresh_rows

    def _gather_rows(self, table: Any) -> Tensor:
        """Rows of [num_blocks * parts * num_kv_heads, block_size * row_size] for block ids [num_seqs, num_blocks]."""
        heads, parts = self.kind.num_kv_heads, self.kind.parts
        rows = (table * parts * heads)[None, :, None, :] + np.arange(parts * heads).reshape(parts, 1, heads, 1)
        return self._tensor(rows.ravel())

    def _bucket(self, queries: Queries, seq_lens: Any, table: Any, masks: Masks, is_all: bool) -> Bucket:
        """table: [num_seqs, max_blocks]"""
        first = self._first_block(queries.pasts)
        num_blocks = -(-seq_lens // self.block_size) - first
        columns = np.arange(int(num_blocks.max()))
        # Padding points at a block of the sequence itself: never at numbers of somebody else.
        columns = first[:, None] + np.where(columns < num_blocks[:, None], columns, 0)
        length = columns.shape[1] * self.block_size
        key_places = (first * self.block_size)[:, None] + np.arange(length)
        return Bucket(
            tokens=None if is_all else self._tensor(queries.tokens.ravel()),
            num_seqs=len(seq_lens),
            num_new=queries.offsets.shape[1],
            rows=self._gather_rows(table[np.arange(len(seq_lens))[:, None], columns]),
            length=length,
            **masks.make(queries, key_places),
        )

    def _chunk(self, start: int, stop: int, seq_len: int, table: Any, masks: Masks) -> Chunk:
        is_tree = masks.batch.tree_mask is not None
        past = seq_len - (stop - start)
        if past == 0:
            is_plain = not is_tree and not self.kind.is_explicit and self.kind.parts == 2
            if is_plain and self.fuses_causal and self.kind.first_seen(np.array([seq_len - 1]))[0] == 0:
                return Chunk(start, stop, None, None)
            return Chunk(start, stop, None, self._query_blocks(start, 0, seq_len, 0, masks))
        first = int(self._first_block(np.array([past]))[0])
        rows = self._gather_rows(table[None, first : -(-seq_len // self.block_size)])
        return Chunk(start, stop, rows, self._query_blocks(start, past, seq_len, first * self.block_size, masks))

    def _query_blocks(self, first_token: int, past: int, seq_len: int, offset: int, masks: Masks) -> list[QueryBlock]:
        """Cut the places from ``past`` on; keys are counted from place ``offset``."""
        is_tree = masks.batch.tree_mask is not None
        starts, pasts, num_new = np.array([first_token]), np.array([past]), np.array([seq_len - past])
        blocks: list[QueryBlock] = []
        for start in range(past, seq_len, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, seq_len)
            first, last = offset, stop
            if is_tree:
                last = seq_len  # places say nothing of who sees whom, nor of how far back a window reaches
            else:
                first = max(offset, int(self.kind.first_seen(np.array([start]))[0]))
            queries = Queries(starts, pasts, num_new, np.arange(start - past, stop - past)[None])
            masked = masks.make(queries, np.arange(first, last)[None])
            blocks.append(QueryBlock(start - past, stop - past, first - offset, last - offset, **masked))
        return blocks

    def _first_block(self, positions: Any) -> Any:
        """The first block that tokens at ``positions`` see."""
        return self.kind.first_seen(positions) // self.block_size

    def _tensor(self, x: Any) -> Tensor:
        return self.send(x)


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
