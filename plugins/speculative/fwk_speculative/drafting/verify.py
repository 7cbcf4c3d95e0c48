"""Verification of drafts: one pass of the target scored them all, and its own picks decide which are accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.device import Upload
from fwk.interfaces.drafting import Gain, TokenSampling
from fwk.interfaces.speculative import Acceptance
from fwk.interfaces.step import LaunchedStep, SequenceRecords, StepRows
from fwk.types import Batch, ScheduledSequence
from fwk_speculative.drafting.acceptance import EXACT, accepted
from fwk_speculative.drafting.draft_tree import DraftTree
from fwk_speculative.drafting.drawn import Drawn
from fwk_speculative.drafting.notes import StepNotes


class Made(Protocol):
    """How drafts were made."""

    def drawn(self, slot: int) -> Tensor | None:
        """The distributions the drafts of a slot were drawn from: [num_drafts, vocab_size]; None: they were certain."""
        ...

    def is_relaxed(self, slot: int) -> bool:
        """Whether the drafts of a slot are kept more often than the target would pick them."""
        ...

    def keep(self, slot: int, path: list[int]) -> None:
        """Move the K/V of the accepted drafts of a tree (indices) to where a chain's would be.

        Comes before the table takes the tokens in.
        """
        ...

    def has_moved(self, slot: int) -> bool:
        """Whether the device has moved them already."""
        ...


class Verifier:
    """Samples the rows of a step, and accepts drafts as long as they equal what was sampled.

    A sequence without drafts gains one token.
    """

    def __init__(
        self,
        table: SequenceRecords,
        sampling: TokenSampling,
        send: Upload,
        made: Made,
        acceptance: Acceptance = EXACT,
    ) -> None:
        self._table = table
        self._sampling = sampling
        self._send = send
        self._made = made
        self._acceptance = acceptance

    def verify(self, step: LaunchedStep) -> dict[int, Gain]:
        """What each sequence that samples gains, by slot."""
        assert step.logits is not None
        logits, failed, trees = step.logits, step.failed, StepNotes.of(step).trees
        rows = self._with_drawn(step.batch, step.rows)
        if trees:
            picked = self._sample_chains(rows, logits, failed, trees)
        else:
            picked = self._sampling.sample_valid(logits, rows, failed)
        gained: dict[int, Gain] = {}
        first_rows: dict[int, tuple[int, int]] = {}
        row = 0
        for place, scheduled in enumerate(step.batch.sequences):
            if scheduled.samples:
                count = 1 + len(scheduled.draft_token_ids)
                gained[scheduled.slot] = gained_by_chain(scheduled, picked[row : row + count], row)
                first_rows[scheduled.slot] = (place, row)
                row += count
        if trees:
            self._walk_trees(logits, failed, trees, first_rows, gained)
        return gained

    def pick(self, step: LaunchedStep) -> Tensor:
        """Pick a token for every row, [num_rows] int64 as ``TokenSampling.pick``, without waiting for the device.

        A row of a tree's draft is one for what follows the path to it. Where processors read the text, the paths to
        the leaves are written into the table in turn, those of all trees side by side.
        """
        assert step.logits is not None
        logits, failed, trees = step.logits, step.failed, StepNotes.of(step).trees
        rows = self._with_drawn(step.batch, step.rows)
        if not trees:
            return self._sampling.pick(logits, rows, failed)
        _stand_at_depths(rows, trees, self._table)
        if not self._sampling.reads_history(rows):
            return self._sampling.pick(logits, rows, failed)
        picked = torch.full((len(rows.slots),), -1, device=logits.device)
        for some in self._by_paths(rows, trees):
            index = self._send(some)
            part = self._sampling.pick(logits.index_select(0, index), rows.take(some, index), failed)
            picked.index_copy_(0, index, part)
        return picked

    def _by_paths(self, rows: StepRows, trees: dict[int, DraftTree]) -> Iterator[np.ndarray]:
        """Rows that the text in the table is right for: [n] int64, each row once."""
        first = {int(slot): int(np.flatnonzero(rows.slots == slot)[0]) for slot in trees}
        left = [(slot, tree, tree.leaf_paths()) for slot, tree in trees.items()]
        done = np.isin(rows.slots, list(trees))
        some = np.flatnonzero(~done).tolist()
        done[:] = False
        while left or some:
            for slot, tree, paths in left:
                path = paths.pop()
                start = int(self._table.num_tokens[slot])
                self._table.token_ids[slot, start : start + len(path)] = [tree.token_ids[node] for node in path]
                mine = [first[slot], *(first[slot] + 1 + node for node in path)]
                some += [row for row in mine if not done[row]]
            done[some] = True
            yield np.array(sorted(some), np.int64)
            some = []
            left = [entry for entry in left if entry[2]]

    def gained(self, scheduled: ScheduledSequence, picked: list[int], row: int, tree: DraftTree | None) -> Gain:
        """What a sequence gains, of whose rows, from ``row`` on, these tokens were picked.

        Comes before the table takes the tokens in. What a tree's accepted drafts stored is moved to where a chain's
        would be; of sequences that run ahead the device has done that.
        """
        if tree is None:
            return gained_by_chain(scheduled, picked, row)
        node, tokens, path = -1, [picked[0]], list[int]()
        while (child := tree.child(node, tokens[-1])) is not None:
            node = child
            path.append(node)
            tokens.append(picked[1 + node])
        if not self._made.has_moved(scheduled.slot):
            self._made.keep(scheduled.slot, path)
        tree.path = path
        return tokens, [row, *(row + 1 + draft for draft in path)]

    def _with_drawn(self, batch: Batch, rows: StepRows) -> StepRows:
        found = self._drawn(batch)
        if not found:
            return rows
        return dataclasses.replace(rows, drawn=Drawn(found, self._table, self._send, self._acceptance))

    def _sample_chains(
        self, rows: StepRows, logits: Tensor, failed: dict[int, BlameSequence], trees: dict[int, DraftTree]
    ) -> list[int]:
        """Sample the rows of sequences without a tree; the others get -1."""
        picked = [-1] * len(rows.slots)
        chains = np.flatnonzero(~np.isin(rows.slots, list(trees)))
        if len(chains):
            index = self._send(chains)
            part = self._sampling.sample_valid(logits.index_select(0, index), rows.take(chains, index), failed)
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
            self._made.keep(slot, path)
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
            part = logits.index_select(0, self._send(np.array(rows)))
            picked = self._sampling.sample_valid(part, StepRows(places, slots, num_tokens, has_drafts=True), failed)
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

    def _drawn(self, batch: Batch) -> dict[tuple[int, int], tuple[int, Tensor | None]]:
        """Drafts that were drawn, and certain ones that thresholds keep, by slot and by the tokens before them."""
        found: dict[tuple[int, int], tuple[int, Tensor | None]] = {}
        for scheduled in batch.sequences:
            if not scheduled.draft_token_ids:
                continue
            proposal = self._made.drawn(scheduled.slot)
            if proposal is not None or self._made.is_relaxed(scheduled.slot):
                start = int(self._table.num_tokens[scheduled.slot])
                for i, draft in enumerate(scheduled.draft_token_ids):
                    found[scheduled.slot, start + i] = (draft, None if proposal is None else proposal[i])
        return found


def gained_by_chain(scheduled: ScheduledSequence, picked: list[int], row: int) -> Gain:
    """What a sequence gains whose drafts, if it has any, are a chain; its rows begin at ``row``."""
    drafts = scheduled.draft_token_ids
    tokens = accepted(drafts, picked) if drafts else picked
    return tokens, list(range(row, row + len(tokens)))


def _stand_at_depths(rows: StepRows, trees: dict[int, DraftTree], table: SequenceRecords) -> None:
    """Correct ``rows.num_tokens`` of trees' drafts, which says where their K/V are."""
    for slot, tree in trees.items():
        mine = np.flatnonzero(rows.slots == slot)
        rows.num_tokens[mine[1:]] = table.num_tokens[slot] + 1 + tree.depths
