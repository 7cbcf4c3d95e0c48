"""Drafts that stay on a device until they are verified: what is computed of them does not wait for the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.device import Upload
from fwk.interfaces.speculative import Drafts
from fwk.interfaces.step import StepRows
from fwk.types import Batch, ForwardBatch, ScheduledSequence
from fwk_speculative.drafting.draft_tree import DraftTree, ancestors, depths, tree_mask


@dataclass(slots=True)
class StoredDrafts:
    """The drafts of a step that only the device knows, of some of its sequences.

    numbers: [2, num_sequences, max_drafts] int64, their tokens and, in trees, parents.
    """

    sequences: list[ScheduledSequence]
    are_trees: list[bool]
    numbers: Tensor

    def tree_rows(self) -> dict[int, int]:
        """Of each slot whose drafts are a tree, its row of ``numbers``."""
        return {s.slot: i for i, (s, is_tree) in enumerate(zip(self.sequences, self.are_trees, strict=True)) if is_tree}

    def learn(self, host: Tensor) -> dict[int, DraftTree]:
        """Write the tokens into the plan; returns the trees by slot. host: a copy of ``numbers`` on the host."""
        tokens, parents = host.tolist()
        trees: dict[int, DraftTree] = {}
        for scheduled, is_tree, mine, above in zip(self.sequences, self.are_trees, tokens, parents, strict=True):
            count = len(scheduled.draft_token_ids)
            scheduled.draft_token_ids[:] = mine[:count]
            if is_tree:
                trees[scheduled.slot] = DraftTree(scheduled.draft_token_ids, above)
        return trees


class DraftStore:
    """The newest drafts of each slot, in the device's memory."""

    def __init__(self, num_slots: int, max_drafts: int, where: torch.device, send: Upload, max_levels: int) -> None:
        """max_levels: of a tree (``SpeculativeDecoder.max_levels``)."""
        self._send = send
        self._max_levels = max_levels
        self._numbers = torch.zeros((2, num_slots, max_drafts), dtype=torch.int64, device=where)
        self._is_tree: dict[int, bool] = {}  # by slot, of those whose drafts are here

    def put(self, slots: np.ndarray, drafts: Drafts, most: np.ndarray) -> list[int]:
        """Keep the drafts of slots, in tensors; returns how many of each, no more than ``most`` [num_seqs]."""
        tokens, parents = drafts.token_ids, drafts.parents
        assert isinstance(tokens, Tensor)
        assert parents is None or isinstance(parents, Tensor)
        assert drafts.counts is not None, "drafts in tensors come with their counts"
        width = min(tokens.shape[1], self._numbers.shape[2])
        index = self._send(slots)
        for kept, made in zip(self._numbers, (tokens, parents), strict=True):
            if made is not None:
                kept[:, :width].index_copy_(0, index, made[:, :width].clamp(min=0 if made is tokens else -1))
        self._is_tree |= dict.fromkeys(slots.tolist(), parents is not None)
        return np.minimum(np.minimum(drafts.counts, most), width).tolist()

    def put_trees(
        self, slots: np.ndarray, token_ids: list[list[int]], parents: list[list[int]], most: np.ndarray
    ) -> list[int]:
        """``put`` of trees that the host made."""
        counts = np.minimum([len(tokens) for tokens in token_ids], most)
        numbers = np.zeros((2, len(slots), max(int(counts.max()), 1)), np.int64)
        for row, count in enumerate(counts.tolist()):
            numbers[0, row, :count], numbers[1, row, :count] = token_ids[row][:count], parents[row][:count]
        tokens, above = self._send(numbers)
        return self.put(slots, Drafts(tokens, above, counts=counts), most)

    def drop(self, slot: int) -> None:
        """Its drafts are known on the host, or of no use."""
        self._is_tree.pop(slot, None)

    def drop_each(self, slots: list[int]) -> None:
        """``drop`` of each of these."""
        if self._is_tree:
            for slot in slots:
                self.drop(slot)

    def has_trees(self, sequences: Iterable[ScheduledSequence]) -> bool:
        """Whether some of these sequences' drafts are trees that only the device knows."""
        return any(s.draft_token_ids and self._is_tree.get(s.slot, False) for s in sequences)

    def enter(self, batch: Batch, forward: ForwardBatch, rows: StepRows, *, draws: bool) -> StoredDrafts | None:
        """Put the drafts of this step into its inputs, where their places are filled with others.

        draws: some of its tokens are drawn, so that ``rows`` must say where drafts of trees stand.
        """
        mine = [(i, s) for i, s in enumerate(batch.sequences) if s.draft_token_ids and s.slot in self._is_tree]
        if not mine:
            return None
        sequences = [s for _, s in mine]
        places = np.array([i for i, _ in mine], np.int64)
        counts = np.array([len(s.draft_token_ids) for s in sequences], np.int64)
        index = self._send(np.array([s.slot for s in sequences], np.int64))
        numbers = self._numbers.index_select(1, index)
        owner, nth = np.repeat(np.arange(len(mine)), counts), _nth(counts)
        ends = np.cumsum([s.num_new_tokens for s in batch.sequences])
        tokens = (ends[places] - counts)[owner] + nth
        width = numbers.shape[2]
        at = self._send(np.stack((tokens, owner * width + nth)).astype(np.int64))
        forward.token_ids.index_copy_(0, at[0], numbers[0].reshape(-1).index_select(0, at[1]))
        are_trees = [self._is_tree[s.slot] for s in sequences]
        if any(are_trees):
            chosen = np.array(are_trees)
            places, counts = places[chosen], counts[chosen]
            below = self._enter_trees(batch, forward, places, counts, numbers[1], np.flatnonzero(chosen))
            if draws:
                self._enter_rows(rows, places, counts, below)
        return StoredDrafts(sequences, are_trees, numbers)

    def _enter_trees(
        self,
        batch: Batch,
        forward: ForwardBatch,
        places: np.ndarray,
        counts: np.ndarray,
        parents: Tensor,
        chosen: np.ndarray,
    ) -> Tensor:
        """Say which draft sees which, and at what depth it stands, which is returned: [sum of counts] int64.

        places, counts [num_trees]: in the batch, and drafts of each; its parents are in the row ``chosen`` of
        ``parents``.
        """
        num_new = np.diff(forward.query_start_np).astype(np.int64)
        if forward.tree_mask is None:
            slots = [s.slot for s in batch.sequences]
            forward.tree_mask = self._send(tree_mask(slots, num_new.tolist(), {}))
        sees = ancestors(parents)
        width, columns = parents.shape[1], forward.tree_mask.shape[1]
        owner, nth = np.repeat(np.arange(len(counts)), counts), _nth(counts)
        rows = (forward.query_start_np[places + 1] - counts)[owner] + nth  # of the step's tokens
        source = chosen[owner] * width + nth
        at = self._send(np.stack((rows, nth, source)).astype(np.int64))
        # A draft's K/V has a place of its own; it stands as far after the first as it is deep.
        first = forward.positions.index_select(0, at[0]) - at[1]
        below = depths(sees).reshape(-1).index_select(0, at[2])
        forward.positions.index_copy_(0, at[0], first + below)
        each = counts[owner]  # entries of the mask for each draft
        other = _nth(each)
        target = np.repeat(rows * columns + (num_new[places] - counts)[owner], each) + other
        cells = self._send(np.stack((target, np.repeat(source * width, each) + other)).astype(np.int64))
        seen = sees.reshape(-1).index_select(0, cells[1])
        forward.tree_mask.view(-1).index_copy_(0, cells[0], seen)
        return below

    def _enter_rows(self, rows: StepRows, places: np.ndarray, counts: np.ndarray, below: Tensor) -> None:
        """Say of the rows of drafts in trees that they stand at their depths, ``below`` [sum of counts].

        Of a node the host knows that it is no deeper than it comes in its tree, nor than a path can be: random numbers
        are sent of so many places alone.
        """
        nth = _nth(counts)
        deepest = np.minimum(nth, self._max_levels - 1)
        mine = np.repeat(np.searchsorted(rows.sequences, places) + 1, counts) + nth
        rows.num_tokens[mine] -= nth - deepest
        at = self._send(np.stack((mine, deepest)))
        if rows.num_fewer is None:
            rows.num_fewer = torch.zeros(len(rows.slots), dtype=torch.int64, device=below.device)
        rows.num_fewer.index_add_(0, at[0], at[1] - below)
        rows.most_fewer += int(deepest.max())


def _nth(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... for each of ``counts``, one after another: [sum of counts] int64."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def on_host(drafts: Drafts) -> tuple[list[list[int]], list[list[int]] | None]:
    """Tokens and parents in lists, for which the host waits: chains end before a token below 0."""
    tokens, parents, counts = drafts.token_ids, drafts.parents, drafts.counts
    if not isinstance(tokens, Tensor):
        assert not isinstance(parents, Tensor), "tokens and parents are tensors, or neither is"
        return tokens, parents
    assert counts is not None, "drafts in tensors come with their counts"
    lists: list[list[int]] = [some[:count] for some, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    if parents is None:
        return [some[: some.index(-1)] if -1 in some else some for some in lists], None
    assert isinstance(parents, Tensor), "tokens and parents are tensors, or neither is"
    return lists, [some[: len(mine)] for some, mine in zip(parents.tolist(), lists, strict=True)]
