"""The drafts of one sequence as a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


class DraftTree:
    """Drafts of one sequence as a tree: where each stands, and which others it follows.

    parents: index of each draft's parent, -1 for the sequence's end; parents come first.
    """

    def __init__(self, token_ids: list[int], parents: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.parents = list(parents[: len(token_ids)])
        self.depths = np.zeros(len(token_ids), np.int64)  # 0 for a child of the sequence's end
        self.sees = np.eye(len(token_ids), dtype=bool)  # [num_drafts, num_drafts]: which sees which
        self.path: list[int] = []  # the drafts that were accepted, once they are verified
        self._children: dict[tuple[int, int], int] = {}
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise ValueError(f"draft {i} of a tree names {parent} as its parent, which does not come before it")
            if parent >= 0:
                self.depths[i] = self.depths[parent] + 1
                self.sees[i] |= self.sees[parent]
            self._children.setdefault((parent, token_ids[i]), i)

    def leaf_paths(self) -> list[list[int]]:
        """The drafts on the way to each draft that no other follows, first things first."""
        inner = set(self.parents)
        return [np.flatnonzero(self.sees[i]).tolist() for i in range(len(self.parents)) if i not in inner]

    def child(self, parent: int, token_id: int) -> int | None:
        """The draft after ``parent`` that says ``token_id``."""
        return self._children.get((parent, token_id))


def ancestors(parents: Tensor) -> Tensor:
    """Which node of a tree follows which, itself included: [num_trees, n, n] bool.

    parents: [num_trees, n] int64, as ``DraftTree`` has them, on any device.
    """
    count = parents.shape[1]
    nodes = torch.arange(count, device=parents.device)
    sees = ((parents.unsqueeze(2) == nodes) | (nodes.unsqueeze(1) == nodes)).float()
    for _ in range(max(count - 1, 1).bit_length()):  # each time twice as many generations
        sees = torch.bmm(sees, sees).clamp_(max=1.0)
    return sees > 0


def depths(sees: Tensor) -> Tensor:
    """How many nodes each follows: [num_trees, n] int64, of ``ancestors``."""
    return sees.sum(2) - 1


def accepted_in_trees(tokens: Tensor, parents: Tensor, counts: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Which nodes a walk from each tree's root goes through (``Verifier.gained``), without a wait for the device.

    tokens, parents: [num_trees, n] int64, as ``DraftTree`` has them, of which a tree's first ``counts`` [num_trees]
    count; picked: [num_trees, 1 + n], what the target picked after the sequence's end, and after each node.

    Returns the order in which these 1 + n stand, [num_trees, 1 + n] int64: the sequence's end (0), the accepted nodes
    (one more than their place in ``tokens``), the others; and how many nodes are accepted, [num_trees] int64.
    """
    count = tokens.shape[1]
    parents = parents.clamp(max=count - 1)  # of those that do not count any number may be there
    nodes = torch.arange(count, device=tokens.device)
    agrees = (picked.gather(1, parents + 1) == tokens) & (nodes < counts.unsqueeze(1))
    same = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (tokens.unsqueeze(2) == tokens.unsqueeze(1))
    agrees &= ~same.tril(-1).any(2)  # the first of equals is the child that a walk finds
    stands = ~(ancestors(parents) & ~agrees.unsqueeze(1)).any(2)
    # Parents come first, so those that stand are in the order of their depths.
    order = torch.where(stands, nodes, nodes + count).sort(1).values % count + 1
    return torch.cat((torch.zeros_like(order[:, :1]), order), 1), stands.sum(1)


def positions_in_trees(
    positions: np.ndarray, slots: np.ndarray, starts: np.ndarray, seq_lens: np.ndarray, trees: Mapping[int, DraftTree]
) -> np.ndarray:
    """Positions with those of drafts: a draft's K/V has a place of its own, but it stands where its depth says."""
    positions = positions.copy()
    for i, slot in enumerate(slots.tolist()):
        if slot in trees:
            below, end = trees[slot].depths, int(starts[i + 1])
            positions[end - len(below) : end] = seq_lens[i] - len(below) + below
    return positions


def tree_mask(slots: list[int], num_new: list[int], trees: Mapping[int, DraftTree]) -> np.ndarray:
    """Which new token of a sequence sees which: [num_tokens, max(num_new)] bool, as ``ForwardBatch.tree_mask``."""
    mask = np.zeros((sum(num_new), max(num_new)), bool)
    start = 0
    for slot, count in zip(slots, num_new, strict=True):
        own = mask[start : start + count, :count]
        own[:] = np.tri(count, dtype=bool)
        if slot in trees:
            sees = trees[slot].sees
            own[count - len(sees) :, count - len(sees) :] = sees
        start += count
    return mask
