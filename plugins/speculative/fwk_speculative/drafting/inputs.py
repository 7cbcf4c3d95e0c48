"""Inputs of passes over drafts, and of steps of which only the device knows where their tokens stand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.drafting import StepInputs
from fwk.interfaces.step import SequenceRecords
from fwk.types import ForwardBatch
from fwk_speculative.drafting.draft_tree import DraftTree, ancestors, depths, tree_mask


class DraftInputs:
    """Fills a worker's buffers: each way overwrites the inputs of the step before."""

    def __init__(self, table: SequenceRecords, buffers: StepInputs) -> None:
        self.table = table
        self._buffers = buffers
        self.send = buffers.send

    def prepare_one(
        self,
        slots: np.ndarray,
        token_ids: np.ndarray | Tensor,
        positions: np.ndarray,
        num_fewer: Tensor | None = None,
    ) -> ForwardBatch:
        """One token of each slot, at a place its blocks reach to: [num_seqs] int64 each.

        Tokens in a tensor may be on the device. num_fewer: [num_seqs] int64 there, so many places before ``positions``.
        """
        starts = np.arange(len(slots) + 1)
        forward = self._buffers.fill(slots, token_ids, positions, starts, positions + 1, starts[:-1])
        if num_fewer is not None:
            forward.num_fewer = num_fewer
            take_off(forward, num_fewer, torch.arange(len(slots), device=num_fewer.device), self.table.block_size)
        return forward

    def prepare_next_late(
        self,
        slots: np.ndarray,
        token_ids: Tensor,
        first: np.ndarray,
        starts: np.ndarray,
        num_fewer: Tensor,
        last: Tensor,
    ) -> ForwardBatch:
        """As ``prepare_next``, of sequences of which only the device knows where their new tokens stand.

        slots, first: [num_seqs] int64, the latter of each one's first place, were none rejected; num_fewer, last:
        [num_seqs] int64 on the device, tokens to take off that, and each one's wanted token; token_ids: [num_tokens].
        """
        counts = np.diff(starts)
        owner = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(starts[-1]) + (first - starts[:-1])[owner]
        forward = self._buffers.fill(slots, token_ids, positions, starts, first + counts, np.arange(len(slots)))
        sequence = self.send(owner)
        forward.num_fewer = num_fewer
        take_off(forward, num_fewer.index_select(0, sequence), sequence, self.table.block_size)
        forward.hidden_indices = last
        return forward

    def prepare_next(
        self, slots: np.ndarray, positions: np.ndarray, starts: np.ndarray, seq_lens: np.ndarray
    ) -> ForwardBatch:
        """Tokens of each slot with the tokens after them, each sequence's last one wanted.

        slots, seq_lens: [num_seqs] int64; starts: [num_seqs + 1]; positions: [num_tokens].
        """
        token_ids = self.table.token_ids[np.repeat(slots, np.diff(starts)), positions + 1]
        last = starts[1:] - 1
        forward = self._buffers.fill(slots, token_ids, positions, starts, seq_lens, last)
        if forward.hidden_indices is None:
            forward.hidden_indices = self.send(last)
        return forward

    def prepare_nodes(
        self, slots: np.ndarray, token_ids: Sequence[Sequence[int]], trees: Sequence[DraftTree], first: np.ndarray
    ) -> ForwardBatch:
        """Trees that hang on each slot, the first of their K and V at place ``first`` [num_seqs]; all are wanted."""
        counts = np.array([len(tokens) for tokens in token_ids], np.int64)
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        places = np.repeat(first, counts) + offsets
        positions = np.repeat(first, counts) + np.concatenate([tree.depths for tree in trees])
        flat = np.concatenate([np.asarray(tokens, np.int64) for tokens in token_ids])
        each = np.arange(starts[-1])
        forward = self._buffers.fill(slots, flat, positions, starts, first + counts, each, places)
        forward.hidden_indices = None
        mask = tree_mask(slots.tolist(), counts.tolist(), dict(zip(slots.tolist(), trees, strict=True)))
        forward.tree_mask = self.send(mask)
        return forward

    def prepare_nodes_on_device(
        self,
        slots: np.ndarray,
        token_ids: Tensor,
        parents: Tensor,
        first: np.ndarray,
        num_fewer: Tensor | None = None,
    ) -> ForwardBatch:
        """As ``prepare_nodes``, of trees that only the device knows: [num_seqs, num_nodes] int64 each.

        num_fewer: [num_seqs] int64 on the device, what to take off ``first``; None: nothing.
        """
        num_seqs, count = token_ids.shape
        flat, each = (first[:, None] + np.arange(count)).ravel(), np.arange(num_seqs * count)
        starts = np.arange(num_seqs + 1) * count
        forward = self._buffers.fill(slots, token_ids.reshape(-1), flat, starts, first + count, each)
        sees = ancestors(parents)
        forward.hidden_indices = None
        forward.tree_mask = sees.view(-1, count)
        if num_fewer is not None:
            forward.num_fewer = num_fewer
            sequence = torch.arange(num_seqs, device=num_fewer.device).repeat_interleave(count)
            take_off(forward, num_fewer.repeat_interleave(count), sequence, self.table.block_size)
        forward.positions.view(-1, count).copy_(forward.positions.view(-1, count)[:, :1] + depths(sees))
        return forward


def take_off(forward: ForwardBatch, fewer: Tensor, sequence: Tensor, block_size: int) -> None:
    """Take ``num_fewer`` off the lengths of a step, and its tokens' own, ``fewer``, off their places.

    fewer, sequence: [num_tokens] int64 on the device, the latter of each token's place in the step. Of others the
    positions may be those of drafts in a tree, which say nothing of their places.
    """
    assert forward.num_fewer is not None
    forward.positions.sub_(fewer)
    forward.seq_lens.sub_(forward.num_fewer)
    nth = forward.positions // block_size
    offsets = forward.positions - nth * block_size
    for group in forward.kv_groups:
        blocks = group.block_table[sequence, nth].long()
        group.slot_mapping.copy_(torch.where(fewer > 0, blocks * block_size + offsets, group.slot_mapping))
