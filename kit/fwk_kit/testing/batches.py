"""Make ``ForwardBatch`` objects by hand, from lengths alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fwk.types import ForwardBatch
from fwk.types.batch import KVGroup, StateRows


def block_tables(
    seq_lens: Sequence[int], block_size: int = 16, num_blocks: int | None = None, seed: int = 0
) -> list[list[int]]:
    """Blocks for sequences of these lengths, no two alike and in no order. Block 0 is left to nobody."""
    needed = [-(-length // block_size) for length in seq_lens]
    total = sum(needed) + 1 if num_blocks is None else num_blocks
    ids = (np.random.default_rng(seed).permutation(total - 1) + 1).tolist()
    tables: list[list[int]] = []
    for count in needed:
        tables.append(ids[:count])
        ids = ids[count:]
    return tables


def make_batch(
    pasts: Sequence[int],
    num_new: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int = 16,
    token_ids: Sequence[Sequence[int]] | None = None,
    parents: Sequence[Sequence[int] | None] | None = None,
    device: str = "cpu",
) -> ForwardBatch:
    """A step in which sequence i, with ``pasts[i]`` tokens in the cache, gets ``num_new[i]`` more.

    tables: each sequence's blocks, enough for past and new tokens. token_ids: the new tokens; zeros by default.
    parents: for each sequence whose new tokens are a tree, every new token's parent among them (-1: none), as in
    ``Drafts``; None where they follow one another. Sequence i has row i of recurrent layers' states. Logits are asked
    for at the last token of each sequence.
    """
    starts = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32)
    seq_lens = np.array([p + n for p, n in zip(pasts, num_new, strict=True)], np.int32)
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(pasts, num_new, strict=True)]).astype(np.int64)
    depths, tree_mask = positions, None
    if parents is not None:
        trees = [sees(range(-1, n - 1) if tree is None else tree) for tree, n in zip(parents, num_new, strict=True)]
        tree_mask = np.zeros((len(positions), max(num_new)), bool)
        for start, tree in zip(starts, trees, strict=False):
            tree_mask[start : start + len(tree), : len(tree)] = tree
        depths = np.repeat(pasts, num_new) + np.concatenate([tree.sum(1) - 1 for tree in trees])
    owner = np.repeat(np.arange(len(pasts)), num_new)
    width = max(len(table) for table in tables)
    table = np.zeros((len(tables), width), np.int32)
    for row, ids in zip(table, tables, strict=True):
        row[: len(ids)] = ids
    slots = table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    ids = np.zeros(len(positions), np.int64) if token_ids is None else np.concatenate(token_ids).astype(np.int64)

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(device)

    return ForwardBatch(
        token_ids=tensor(ids),
        positions=tensor(depths),
        query_start=tensor(starts),
        seq_lens=tensor(seq_lens),
        logits_indices=tensor(starts[1:].astype(np.int64) - 1),
        kv_groups=[KVGroup(tensor(slots), tensor(table), slots, table)],
        query_start_np=starts,
        seq_lens_np=seq_lens,
        is_decode=all(n == 1 for n in num_new),
        tree_mask=None if tree_mask is None else tensor(tree_mask),
        state_rows=StateRows(tensor(np.arange(len(pasts))), np.arange(len(pasts))),
    )


def sees(parents: Sequence[int]) -> np.ndarray:
    """[n, n] bool: token i sees token j, one of its ancestors or itself."""
    mask = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask
