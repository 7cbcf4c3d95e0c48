"""Cut a step into tiles, once for all layers of one kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fwk_attention.triton_paged.shared import share, unused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fwk.types import ForwardBatch

    Send = Callable[[str, Any], Tensor]
    """A numpy array, by a name, to the device."""

MAX_SHORT = 16
"""New tokens up to which a sequence's tiles are small, and its keys split among programs."""

MAX_PARTS = 2048
"""Parts of split tiles in a launch of a deterministic run's prompts, unless a tile has more: their outcomes take up
memory. In bfloat16 with 8 KV heads of 128 these are 134 MB."""

MAX_HEADS = 16
"""Query heads of one KV head that a program computes together."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a program takes on at once; all powers of two."""

    tokens: int  # whose K or V it stores
    short_rows: int  # of a short sequence's tile: tokens times heads. At least 16, for the matrix units
    rows: int  # of other tiles
    keys: int  # per turn of its loop

    @property
    def shared_keys(self) -> int:
        """Per turn of a shared tile's, whose rows take more registers."""
        return max(self.keys // 2, 16)


INTERPRETED = Sizes(tokens=128, short_rows=64, rows=128, keys=256)
"""An operation takes the interpreter the same time on many numbers as on few."""


def deterministic(sizes: Sizes) -> Sizes:
    """With tiles of one size, however many new tokens a sequence has: of another, matrix units add up otherwise."""
    return replace(sizes, rows=sizes.short_rows)


def device_sizes(head_size: int, value_head_size: int, element_size: int) -> Sizes:
    """What registers and shared memory (two turns' K and V) hold without spilling."""
    row_bytes = head_size * element_size
    keys = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    rows = 64 if value_head_size <= 128 else 32
    if element_size > 2:
        rows, keys = 16, 16  # of float32: larger tiles keep their numbers in local memory, off the registers
    return Sizes(tokens=16 if head_size <= 256 else 4, short_rows=16, rows=rows, keys=keys)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers alike in this share one plan."""

    kv_group: int
    group: int  # query heads per KV head
    sliding_window: int | None
    sizes: Sizes
    split: int  # keys per part of a split tile, the same in every step: a sequence's neighbours must not matter
    splits_all: bool = False  # long chunks, too, so that a token's keys are added up in one order in any chunk
    shared_block_size: int = 0  # tokens per block, where parts that short sequences share are computed once; 0: nowhere

    @property
    def heads(self) -> int:
        """Query heads per program, a power of two."""
        return min(power_of_two(self.group), MAX_HEADS)

    @property
    def slots(self) -> int:
        """Tokens of a shared tile."""
        return self.sizes.rows // self.heads


@dataclass(slots=True)
class Launch:
    """Tiles of one size."""

    rows: int
    tiles: Tensor  # [num_tiles, 8] int32, see ``kernels.TILE_FIELDS``
    num_parts: int
    joins: Tensor | None  # [num_joins, 5] int32, see ``kernels.JOIN_FIELDS``
    shared: Tensor | None = None  # [num_shared, fields] int32, see ``shared.share``


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest one that is no less than n."""
    return max(least, 1 << (n - 1).bit_length())


def sent_names(kind: LayerKind) -> dict[str, int]:
    """What ``plan_launches`` sends of such layers, by name the int32 in a row."""
    names = {f"shared {kind}": len(unused(kind.slots))} if kind.shared_block_size else {}
    for is_short in (True, False):
        names |= {f"tiles {kind} {is_short} 0": 8, f"joins {kind} {is_short} 0": 5}  # as ``Launch`` has them
    return names


def plan_launches(batch: ForwardBatch, kind: LayerKind, send: Send) -> list[Launch]:
    """The step's tiles: those of short sequences, and those of the others."""
    starts = batch.query_start_np[:-1].astype(np.int64)
    num_new = np.diff(batch.query_start_np).astype(np.int64)
    pasts = batch.seq_lens_np.astype(np.int64) - num_new
    launches: list[Launch] = []
    for is_short in (True, False):
        chosen = np.flatnonzero((num_new <= MAX_SHORT) == is_short)
        if not len(chosen):
            continue
        rows = kind.sizes.short_rows if is_short else kind.sizes.rows
        tiles, joins = cut(
            chosen,
            starts[chosen],
            num_new[chosen],
            pasts[chosen],
            tokens_per_tile=rows // kind.heads,
            window=kind.sliding_window,
            is_tree=batch.tree_mask is not None,
            split=kind.split if is_short or kind.splits_all else None,
        )
        shared = None
        if is_short and kind.shared_block_size:
            tiles, found = share_parts(tiles, batch, kind)
            shared = send(f"shared {kind}", found.astype(np.int32)) if len(found) else None
        for nth, (some, joined) in enumerate([(tiles, joins)] if is_short else apart(tiles, joins)):
            num_parts, name = int(joined[:, 4].sum()), f"{kind} {is_short} {nth}"
            sent = send(f"joins {name}", joined.astype(np.int32)) if num_parts else None
            launches.append(Launch(rows, send(f"tiles {name}", some.astype(np.int32)), num_parts, sent, shared))
    return launches


def share_parts(tiles: Any, batch: ForwardBatch, kind: LayerKind, most: int | None = None) -> tuple[Any, Any]:
    """``share`` for the tiles of short sequences."""
    return share(
        tiles,
        batch.kv_groups[kind.kv_group].block_table_np,
        block_size=kind.shared_block_size,
        split=kind.split,
        tokens_per_tile=kind.sizes.short_rows // kind.heads,
        slots=kind.slots,
        most=most,
    )


def apart(tiles: Any, joins: Any) -> list[tuple[Any, Any]]:
    """The tiles and joins of ``cut`` in launches of up to ``MAX_PARTS`` parts each, whose places begin at 0."""
    ends = joins[:, 3] + joins[:, 4]
    found: list[tuple[Any, Any]] = []
    first = tile = 0
    while first < len(joins):
        begin = joins[first, 3]
        last = max(int(np.searchsorted(ends, begin + MAX_PARTS, "right")), first + 1)
        # Tiles that are not split go with the split ones before them.
        stop = (
            int(np.searchsorted(np.maximum.accumulate(tiles[:, 7]), ends[last - 1]))
            if last < len(joins)
            else len(tiles)
        )
        some, joined = tiles[tile:stop].copy(), joins[first:last].copy()
        some[some[:, 7] >= 0, 7] -= begin
        joined[:, 3] -= begin
        found.append((some, joined))
        first, tile = last, stop
    return found or [(tiles, joins)]


def shortened(plan: dict[LayerKind, list[Launch]], batch: ForwardBatch) -> dict[LayerKind, list[Launch]]:
    """The same plan, once the device has taken ``ForwardBatch.num_fewer`` off the lengths that it was made for.

    A tile keeps its part of the keys, so that a sequence is cut as ever; keys past the end are none's. What a window
    begins with moves with it. Shared tiles stay: the kernel holds their keys against positions, which the device has.
    """
    if batch.num_fewer is None:
        return plan
    fewer = batch.num_fewer.int()
    for kind, launches in plan.items():
        for launch in launches:
            tiles = launch.tiles
            by = fewer.index_select(0, tiles[:, 0])
            tiles[:, 3].sub_(by)
            if kind.sliding_window is not None:
                tiles[:, 5].sub_(by).clamp_(min=0)
                tiles[:, 6].sub_(by)
            tiles[:, 6].copy_(torch.minimum(tiles[:, 6], tiles[:, 3] + tiles[:, 2]))
    return plan


def decode_tiles(batch: ForwardBatch, kind: LayerKind) -> tuple[Any, Any]:
    """(tiles [n, 8], joins [m, 5]) of a decode step, as ``plan_launches`` makes them: numpy int64."""
    count = len(batch.seq_lens_np)
    lens, window = batch.seq_lens_np, kind.sliding_window
    keys_from = np.zeros(count, np.int64) if window is None else np.maximum(lens - window, 0)
    if count and int((lens - keys_from).max()) <= kind.split:  # none is split: a tile for each sequence
        tiles = np.zeros((count, 8), np.int64)
        tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = np.arange(count), batch.query_start_np[:-1], 1, lens - 1
        tiles[:, 5], tiles[:, 6], tiles[:, 7] = keys_from, lens, -1
        return tiles, np.zeros((0, 5), np.int64)
    return cut(
        np.arange(count),
        batch.query_start_np[:-1].astype(np.int64),
        np.ones(count, np.int64),
        batch.seq_lens_np.astype(np.int64) - 1,
        tokens_per_tile=kind.sizes.short_rows // kind.heads,
        window=kind.sliding_window,
        is_tree=False,
        split=kind.split,
    )


def cut(
    sequences: Any,
    starts: Any,
    num_new: Any,
    pasts: Any,
    *,
    tokens_per_tile: int,
    window: int | None,
    is_tree: bool,
    split: int | None,
) -> tuple[Any, Any]:
    """(tiles [n, 8], joins [m, 5]) of sequences [k]: numpy int64."""
    counts = -(-num_new // tokens_per_tile)
    owner = np.repeat(np.arange(len(sequences)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens_per_tile
    new, past = num_new[owner], pasts[owner]
    # In a tree, places say nothing of who sees whom, and a token's position is no less than that of the first.
    last_key = past + (new if is_tree else np.minimum(first + tokens_per_tile, new))
    first_key = np.zeros_like(past)
    if window is not None:
        first_key = np.maximum(past + (0 if is_tree else first) - window + 1, 0)
    num_parts = np.ones_like(past) if split is None else -(-(last_key - first_key) // split)
    tile = np.repeat(np.arange(len(owner)), num_parts)
    nth = np.arange(len(tile)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    is_split = num_parts > 1
    held = np.where(is_split, num_parts, 0)
    first_part = np.cumsum(held) - held
    keys_from = first_key[tile] + nth * (split or 0)
    keys_to = last_key[tile] if split is None else np.minimum(keys_from + split, last_key[tile])
    part = np.where(is_split[tile], first_part[tile] + nth, -1)
    begin = starts[owner]
    columns = (sequences[owner][tile], begin[tile], new[tile], past[tile], first[tile], keys_from, keys_to, part)
    joins = np.stack((begin, new, first, first_part, num_parts), 1)[is_split]
    return np.stack(columns, 1), joins
