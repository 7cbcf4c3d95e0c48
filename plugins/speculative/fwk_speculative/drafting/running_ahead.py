"""Sequences of which steps are launched while drafts of them are being verified: the device counts what is rejected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.device import Upload
from fwk.interfaces.step import LaunchedStep, SequenceRecords, StepRows
from fwk.types import ForwardBatch, ScheduledSequence, SequenceResult
from fwk_speculative.drafting.draft_tree import accepted_in_trees
from fwk_speculative.drafting.inputs import take_off
from fwk_speculative.drafting.notes import StepNotes


class RunningAhead:
    """Which sequences run ahead, and how many tokens each has.

    - ``slots``: [num_slots] bool: those that do.
    - ``unverified``: [num_slots + 1] int64: drafts that are being verified, which count as if all were accepted.
    - ``rejected``: [num_slots + 1] int64 on the device: those of them that were rejected; the last entry belongs to no
      slot and stays 0.
    """

    def __init__(self, table: SequenceRecords, send: Upload, where: torch.device, max_accepted: int) -> None:
        """max_accepted: drafts of a sequence that a step accepts, at most."""
        num_slots = len(table.num_tokens)
        self._table = table
        self._send = send
        self._max_accepted = max_accepted
        self.slots = np.zeros(num_slots, bool)
        self.unverified = np.zeros(num_slots + 1, np.int64)
        self.rejected = torch.zeros(num_slots + 1, dtype=torch.int64, device=where)
        self._to_tell: set[int] = set()  # slots of sequences whose results have not said so

    def begin(self, slot: int) -> None:
        """The sequence that has taken a slot runs ahead."""
        self.slots[slot] = True
        self._to_tell.add(slot)

    def forget(self, slots: Sequence[int]) -> None:
        """These slots' sequences are gone."""
        self._to_tell.difference_update(slots)
        for slot in slots:
            self.slots[slot] = False
            self.unverified[slot] = 0

    def tell(self, results: dict[int, SequenceResult]) -> None:
        """Say of sequences that run ahead, with their first results, that they do."""
        for slot in self._to_tell.intersection(results):
            results[slot].runs_ahead = True
            self._to_tell.discard(slot)

    def drafts_in(self, step: LaunchedStep) -> np.ndarray | None:
        """``LaunchedStep.num_ahead``."""
        if not step.rows.has_drafts or step.rows.plan is None:
            return None
        counts = np.array([len(s.draft_token_ids) for s in step.batch.sequences], np.int64)
        counts[~self.slots[step.rows.plan[0]]] = 0
        return counts if counts.any() else None

    def shorten(self, step: LaunchedStep, forward: ForwardBatch) -> None:
        """Take drafts off the lengths of sequences that the step before rejected: only the device knows how many."""
        assert step.rows.plan is not None
        slots, num_new, _ = step.rows.plan
        if self.unverified[slots].any():
            self._shorten(forward, slots, np.repeat(slots, num_new))
            self._shorten_rows(step.rows)

    def _shorten(self, forward: ForwardBatch, slots: np.ndarray, rows: np.ndarray) -> None:
        """slots: [num_seqs] int64; rows: [num_tokens] int64, the slot of each token, without padding."""
        null, unverified = self._table.null_slot, self.unverified
        own = np.full(forward.num_tokens, null)
        own[: len(rows)] = np.where(unverified[rows] > 0, rows, null)
        if forward.is_static:  # a row is a sequence, and its own
            index = self._send(own)
            fewer = forward.num_fewer = self.rejected.index_select(0, index)
            sequence = torch.arange(len(own), device=index.device)
        else:
            places = np.repeat(np.arange(len(slots)), np.diff(forward.query_start_np))
            both = self._send(np.concatenate((np.where(unverified[slots] > 0, slots, null), own, places)))
            of_each, index, sequence = both.split((len(slots), len(own), len(own)))
            forward.num_fewer, fewer = self.rejected.index_select(0, of_each), self.rejected.index_select(0, index)
        take_off(forward, fewer, sequence, self._table.block_size)

    def _shorten_rows(self, rows: StepRows) -> None:
        """``_shorten`` of the texts that tokens are drawn after."""
        if rows.sampling_state(self._table).all_greedy or not len(rows.slots):
            return
        unverified = self.unverified[rows.slots]
        sure = np.maximum(unverified - self._max_accepted, 0)  # drafts of a tree that no path can have
        there = self._send(np.stack((np.where(unverified > 0, rows.slots, self._table.null_slot), sure)))
        rows.num_tokens -= sure
        rows.num_fewer = self.rejected.index_select(0, there[0]) - there[1]
        rows.most_fewer = int((unverified - sure).max())

    def count(self, step: LaunchedStep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``Drafting.count``: drafts of sequences that do not run ahead count when they are verified."""
        assert step.rows.plan is not None
        slots, num_new, samples = step.rows.plan
        plain = np.array([not s.draft_token_ids for s in step.batch.sequences])
        counts = plain | self.slots[slots]
        slots, num_new, samples = slots[counts], num_new[counts], samples[counts]
        if step.num_ahead is None:
            return slots, num_new, samples
        num_drafts = step.num_ahead[counts]
        self.unverified[slots] += num_drafts
        return slots, num_new, samples + num_drafts

    def accept(self, step: LaunchedStep, picked: Tensor, newest: Tensor) -> None:
        """Have the device count how many drafts of sequences that run ahead it accepts (``acceptance.accepted``)."""
        assert step.num_ahead is not None
        assert step.rows.plan is not None
        notes = StepNotes.of(step)
        chosen = np.flatnonzero(step.num_ahead)
        trees = {} if notes.stored is None else notes.stored.tree_rows()
        if trees:
            is_tree = np.isin(step.rows.plan[0][chosen], list(trees))
            if is_tree.any():
                self._accept_trees(step, picked, newest, chosen[is_tree], trees)
            chosen = chosen[~is_tree]
            if not len(chosen):
                return
        counts = step.num_ahead[chosen]
        most = int(counts.max())
        numbers = np.empty((3 + 2 * most, len(chosen)), np.int64)
        numbers[0], numbers[1] = step.rows.plan[0][chosen], counts
        first = numbers[2] = np.searchsorted(step.rows.sequences, chosen)
        nth = np.arange(most)[:, None]
        numbers[3 : 3 + most] = np.minimum(first + nth, len(step.rows.slots) - 1)
        late = notes.late
        if late is None:
            drafts = np.full((len(chosen), most), -1, np.int64)  # is never picked where a token can be
            drafts[counts[:, None] > nth.T] = np.concatenate(
                [step.batch.sequences[i].draft_token_ids for i in chosen.tolist()]
            )
            numbers[3 + most :] = drafts.T
        else:  # where they stand in the step's input, and -1 past the last
            places = (step.rows.query_start[chosen + 1] - counts) + nth
            numbers[3 + most :] = np.where(nth < counts, places, -1)
        there = self._send(numbers)
        slots, drafted = there[0], there[3 + most :]
        if late is not None:
            drafted = torch.where(drafted < 0, drafted, late.token_ids[drafted.clamp(min=0)])
        agree = picked[there[3 : 3 + most]].eq_(drafted)
        num_accepted = agree.cumprod_(0).sum(0)
        newest.index_copy_(0, slots, picked.index_select(0, num_accepted + there[2]).clamp_(min=0))
        self.rejected.index_copy_(0, slots, num_accepted.neg_().add_(there[1]))

    def _accept_trees(
        self, step: LaunchedStep, picked: Tensor, newest: Tensor, chosen: np.ndarray, trees: dict[int, int]
    ) -> None:
        """``accept`` of trees, and the order in which their tokens then stand.

        chosen: [num_trees], places in the batch; trees: by slot, its row of ``StoredDrafts.numbers``.
        """
        assert step.num_ahead is not None
        assert step.rows.plan is not None
        notes = StepNotes.of(step)
        assert notes.stored is not None
        assert notes.late is not None, "steps run ahead of trees only where their K/V are moved at launch"
        slots, counts = step.rows.plan[0][chosen], step.num_ahead[chosen]
        first = np.searchsorted(step.rows.sequences, chosen)
        begin = step.rows.query_start[chosen + 1] - counts - 1  # of the step's tokens: the last one before the drafts
        stored = np.array([trees[slot] for slot in slots.tolist()], np.int64)
        there = self._send(np.stack((slots, counts, first, begin, stored)))
        width = 1 + int(counts.max())
        owner = np.repeat(np.arange(len(chosen)), counts + 1)
        cells = ranges(np.arange(len(chosen)) * width, counts + 1)
        at = self._send(np.stack((begin[owner] + cells - owner * width, cells)))
        rows = there[2].unsqueeze(1) + torch.arange(width, device=picked.device)
        mine = picked.index_select(0, rows.clamp_(max=len(picked) - 1).view(-1)).view(rows.shape)
        tokens, parents = notes.stored.numbers.index_select(1, there[4])[:, :, : width - 1]
        order, num_accepted = accepted_in_trees(tokens, parents, there[1], mine)
        last = mine.gather(1, order.gather(1, num_accepted.unsqueeze(1))).squeeze(1)
        newest.index_copy_(0, there[0], last.clamp_(min=0))
        self.rejected.index_copy_(0, there[0], there[1] - num_accepted)
        each = (there[3].unsqueeze(1) + order).view(-1).index_select(0, at[1])
        late = notes.late
        late.order = torch.arange(len(late.token_ids), device=picked.device).index_copy_(0, at[0], each)

    def of_step(self, step: LaunchedStep) -> np.ndarray:
        """By sequence of a step, the slot of one that runs ahead with drafts in it, else nobody's: [num_seqs] int64."""
        assert step.rows.plan is not None
        slots, null = step.rows.plan[0], self._table.null_slot
        return np.full(len(slots), null) if step.num_ahead is None else np.where(step.num_ahead > 0, slots, null)

    def finish(self, scheduled: ScheduledSequence, token_ids: list[int]) -> None:
        """Take in what a step made of a sequence with drafts."""
        slot, num_drafts = scheduled.slot, len(scheduled.draft_token_ids)
        if not self.slots[slot]:
            self._table.finish(scheduled, token_ids)
            return
        only, gained = np.array([slot]), np.array([len(token_ids)])
        self.settle(only, np.array([num_drafts]), gained, np.array(token_ids))

    def settle(self, slots: np.ndarray, num_drafts: np.ndarray, gained: np.ndarray, token_ids: np.ndarray) -> None:
        """Take in what became of drafts of sequences that run ahead, each one's oldest step: as ``settle_chains``."""
        table, rejected = self._table, num_drafts + 1 - gained
        write(table, slots, table.num_tokens[slots] - table.unknown[slots], gained, token_ids)
        table.num_computed[slots] -= rejected
        table.num_tokens[slots] -= rejected
        table.unknown[slots] -= num_drafts + 1
        self.unverified[slots] -= num_drafts


def settle_chains(
    table: SequenceRecords,
    slots: np.ndarray,
    num_new: np.ndarray,
    num_drafts: np.ndarray,
    gained: np.ndarray,
    token_ids: np.ndarray,
) -> None:
    """Take in a step of sequences whose drafts are chains, as ``SequenceRecords.finish`` does.

    slots, num_new, num_drafts, gained: [num_seqs] each, the last of how many tokens each sequence gains;
    token_ids: [sum of gained], one sequence's after another's.
    """
    rejected = num_drafts + 1 - gained
    stands = rejected == 0 if table.has_states else np.ones(len(slots), bool)
    table.num_computed[slots[stands]] += (num_new - rejected)[stands]
    ends = table.num_tokens[slots]
    write(table, slots, ends, gained, token_ids)
    table.num_tokens[slots] = ends + gained


def write(
    table: SequenceRecords, slots: np.ndarray, ends: np.ndarray, counts: np.ndarray, token_ids: np.ndarray
) -> None:
    """``counts`` [num_seqs] of the tokens [sum of counts] for each of ``slots``, from place ``ends`` on."""
    table.token_ids[np.repeat(slots, counts), ranges(ends, counts)] = token_ids


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each of ``starts`` [n], as many as ``counts`` [n] says: [sum of counts] int64."""
    return np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
