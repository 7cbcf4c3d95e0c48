"""Verification of drafts: one pass of the target scored them all, and its own picks decide which are accepted."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fwk.errors import BlameSequence
from fwk.types import Batch
from fwk.worker.acceptance import accepted
from fwk.worker.draft_tree import DraftTree
from fwk.worker.drafting import NoDrafting
from fwk.worker.inputs import StepRows
from fwk.worker.sampling import SamplingPipeline
from fwk.worker.sequence_table import SequenceTable

Gain = tuple[list[int], slice | list[int]]
"""A sequence's new tokens (accepted drafts and the one after them), and the rows of logits they were sampled from."""


class Verifier:
    """Samples the rows of a step, and accepts drafts as long as they equal what was sampled.

    A sequence without drafts gains one token.
    """

    def __init__(self, table: SequenceTable, sampling: SamplingPipeline, drafting: NoDrafting) -> None:
        self._table = table
        self._sampling = sampling
        self._drafting = drafting

    def verify(
        self,
        batch: Batch,
        rows: StepRows,
        logits: Tensor,
        failed: dict[int, BlameSequence],
        trees: dict[int, DraftTree],
    ) -> dict[int, Gain]:
        """What each sequence that samples gains, by slot.

        failed: slots without a result and why; more are added. trees: the drafts that are trees, by slot.
        """
        drawn = self._drawn(batch, logits)
        rows = dataclasses.replace(rows, drawn=drawn) if drawn else rows
        if trees:
            picked = self._sample_chains(rows, logits, failed, trees)
        else:
            picked = self._sampling.sample_valid(logits, rows, failed)
        gained: dict[int, Gain] = {}
        first_rows: dict[int, tuple[int, int]] = {}
        row = 0
        for place, scheduled in enumerate(batch.sequences):
            if scheduled.samples:
                drafts = scheduled.draft_token_ids
                tokens = accepted(drafts, picked[row : row + 1 + len(drafts)]) if drafts else picked[row : row + 1]
                gained[scheduled.slot] = (tokens, slice(row, row + len(tokens)))
                first_rows[scheduled.slot] = (place, row)
                row += 1 + len(drafts)
        if trees:
            self._walk_trees(logits, failed, trees, first_rows, gained)
        return gained

    def _sample_chains(
        self, rows: StepRows, logits: Tensor, failed: dict[int, BlameSequence], trees: dict[int, DraftTree]
    ) -> list[int]:
        """Sample the rows of sequences without a tree; the others get -1."""
        picked = [-1] * len(rows.slots)
        chains = np.flatnonzero(~np.isin(rows.slots, list(trees)))
        if len(chains):
            some = logits[torch.from_numpy(chains).to(logits.device)]
            part = self._sampling.sample_valid(some, rows.take(chains), failed)
            for row, token in zip(chains.tolist(), part, strict=True):
                picked[row] = token
        return picked

    def _walk_trees(
        self,
        logits: Tensor,
        failed: dict[int, BlameSequence],
        trees: dict[int, DraftTree],
        first_rows: dict[int, tuple[int, int]],
        gained: dict[int, Gain],
    ) -> None:
        paths = self._walk(trees, first_rows, logits, failed)
        for slot, (tokens, path) in paths.items():
            self._drafting.keep(slot, path)
            trees[slot].path = path
            row = first_rows[slot][1]
            gained[slot] = (tokens, [row, *(row + 1 + draft for draft in path)])

    def _walk(
        self,
        trees: dict[int, DraftTree],
        first_rows: dict[int, tuple[int, int]],
        logits: Tensor,
        failed: dict[int, BlameSequence],
    ) -> dict[int, tuple[list[int], list[int]]]:
        """Follow each tree from its root as far as the target's own picks go, all trees one level at a time.

        first_rows: of each slot, its place in the batch and the row of ``logits`` of its newest known token; the rows
        of its drafts come after. Every pick sees the true tokens before it: those of the path so far are written into
        the table. Returns for each slot the tokens gained and the drafts (indices) that the path went through.
        """
        found: dict[int, tuple[list[int], list[int]]] = {slot: ([], []) for slot in trees}
        at = dict.fromkeys(trees, -1)
        while at:
            slots = np.array(list(at), np.int64)
            depths = np.array([len(found[slot][0]) for slot in at], np.int64)
            rows = [first_rows[slot][1] + 1 + node for slot, node in at.items()]
            places = np.array([first_rows[slot][0] for slot in at], np.int64)
            num_tokens = self._table.num_tokens[slots] + depths
            part = logits[torch.tensor(rows, device=logits.device)]
            picked = self._sampling.sample_valid(part, StepRows(places, slots, num_tokens), failed)
            self._table.token_ids[slots, num_tokens] = np.maximum(picked, 0)
            for slot, token in zip(slots.tolist(), picked, strict=True):
                tokens, path = found[slot]
                tokens.append(token)
                child = trees[slot].child(at[slot], token)
                if child is None:
                    del at[slot]
                else:
                    at[slot] = child
                    path.append(child)
        return found

    def _drawn(self, batch: Batch, logits: Tensor) -> dict[tuple[int, int], tuple[int, Tensor]]:
        """Drafts that were drawn, by slot and by the number of tokens before them."""
        found: dict[tuple[int, int], tuple[int, Tensor]] = {}
        for scheduled in batch.sequences:
            if not scheduled.draft_token_ids:
                continue
            proposal = self._drafting.drawn(scheduled.slot)
            if proposal is None and self._drafting.is_relaxed(scheduled.slot):  # certain drafts, kept by probability
                certain = torch.tensor(scheduled.draft_token_ids, device=logits.device)
                proposal = one_hot(certain, logits.shape[-1]).float()
            if proposal is not None:
                start = int(self._table.num_tokens[scheduled.slot])
                for i, draft in enumerate(scheduled.draft_token_ids):
                    found[scheduled.slot, start + i] = (draft, proposal[i])
        return found
