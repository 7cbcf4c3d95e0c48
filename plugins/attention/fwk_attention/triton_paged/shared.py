"""Ranges of keys whose blocks several rows of a step share, computed once for all of them (cascade attention).

Hydragen (Juravsky et al. 2024) and FlashInfer (Ye et al. 2025) compute a shared prefix by products of matrices and join
it with each sequence's rest. Here the parts of a split sequence are such pieces already: a part that others share
becomes rows of one tile, leaves its outcome where it would have left it alone, and is joined as ever.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SHARED_FIELDS = 3
"""int32 per shared tile: a sequence whose block table has the keys, first key, last key (exclusive); then its slots."""

SLOT_FIELDS = 3
"""int32 per slot: token in the batch (-1: none), the part that its outcome is of, its index in its own tile."""


def share(
    tiles: Any, table: Any, *, block_size: int, split: int, tokens_per_tile: int, slots: int, most: int | None = None
) -> tuple[Any, Any]:
    """The tiles of ``cut`` that stay, and shared tiles [m, SHARED_FIELDS + slots * SLOT_FIELDS], for layers without a
    sliding window.

    A range is shared if the same blocks hold it in several tiles, all of it lies before their new tokens, and tiles of
    ``slots`` tokens are fewer than those they replace. Two sequences whose first blocks differ share nothing.

    table: [num_seqs, width] block ids on the host. most: shared tiles at most; further ranges are not shared.
    """
    sequences, starts, num_new, pasts, first, keys_from, keys_to, parts = tiles.T
    whole = np.flatnonzero((parts >= 0) & (keys_to <= pasts) & (keys_to - keys_from == split))
    heads = table[sequences[whole[keys_from[whole] == 0]], 0]
    if len(np.unique(heads)) == len(heads):
        return tiles, unused(slots)[None][:0]
    whole, groups = _alike(whole, sequences[whole], keys_from[whole], table, block_size, split)
    counts = np.minimum(tokens_per_tile, num_new[whole] - first[whole])
    num_groups = int(groups[-1]) + 1
    num_tiles = -(-np.bincount(groups, counts, num_groups).astype(np.int64) // slots)
    pays = num_tiles < np.bincount(groups, minlength=num_groups)
    if most is not None:
        pays &= np.cumsum(np.where(pays, num_tiles, 0)) <= most
    if not pays.any():
        return tiles, unused(slots)[None][:0]
    chosen = pays[groups]
    whole, groups, counts = whole[chosen], groups[chosen], counts[chosen]
    owner = np.repeat(np.arange(len(whole)), counts)  # of each token
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    of_token = groups[owner]
    place = np.arange(len(owner)) - np.searchsorted(of_token, of_token)  # in the group, whose tokens are neighbours
    num_tiles = np.where(pays, num_tiles, 0)
    tile, slot = (np.cumsum(num_tiles) - num_tiles)[of_token] + place // slots, place % slots
    shared = np.repeat(unused(slots)[None], int(num_tiles.sum()), 0)
    mine = whole[owner]
    shared[tile, :SHARED_FIELDS] = np.stack((sequences[mine], keys_from[mine], keys_to[mine]), 1)
    fields = SHARED_FIELDS + slot[:, None] * SLOT_FIELDS + np.arange(SLOT_FIELDS)
    shared[tile[:, None], fields] = np.stack((starts[mine] + first[mine] + nth, parts[mine], nth), 1)
    stays = np.ones(len(tiles), bool)
    stays[whole] = False
    return tiles[stays], shared


def _alike(whole: Any, sequences: Any, keys_from: Any, table: Any, block_size: int, split: int) -> tuple[Any, Any]:
    """Those of ``whole`` in an order in which the same ranges of the same blocks are neighbours, and of each its group.

    Groups are numbered from 0 in that order.
    """
    width = -(-split // block_size) + (split % block_size > 0)  # a range may begin within a block
    last = (keys_from + split - 1) // block_size
    columns = np.minimum((keys_from // block_size)[:, None] + np.arange(width), last[:, None])
    ids = table[sequences[:, None], columns]
    powers = np.cumprod(np.full(width + 1, 0x9E3779B97F4A7C15, np.uint64))
    hashes = ids.astype(np.uint64) @ powers[:-1] + keys_from.astype(np.uint64) * powers[-1]
    order = np.argsort(hashes, kind="stable")
    sorted_hashes = hashes[order]
    begins = np.append(True, sorted_hashes[1:] != sorted_hashes[:-1])[: len(order)]
    groups = np.cumsum(begins) - 1
    leaders = order[begins][groups]
    is_same = (keys_from[order] == keys_from[leaders]) & (ids[order] == ids[leaders]).all(1)
    return whole[order[is_same]], groups[is_same]  # another of the same hash stays by itself


def unused(slots: int) -> Any:
    """[SHARED_FIELDS + slots * SLOT_FIELDS] int64: a shared tile of no key and no token."""
    return np.array((0,) * SHARED_FIELDS + (-1, 0, 0) * slots, np.int64)
