"""Steps that a device was given and whose tokens the host has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.features.worker import Made, put_results
from fwk.interfaces.device import Device, Event
from fwk.interfaces.logprobs import packed_logprobs, unpacked_logprobs
from fwk.types import Batch, ForwardBatch, ScheduledSequence, SequenceResult, StepResult
from fwk.worker.drafting.acceptance import count_gained
from fwk.worker.drafting.draft_store import StoredDrafts
from fwk.worker.drafting.draft_tree import DraftTree, accepted_in_trees
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.runner.step_rows import StepRows
from fwk.worker.sampling.step_sampler import StepSampler


@dataclass(slots=True)
class Launched:
    """What the runner has given the device to do in a step, but for the choice of tokens.

    failed: slots that a processor has refused, and why. hidden: [num_hidden, n], as ``StepModel.run`` returns it, and
    starts [num_seqs + 1] where each sequence's begin there; for who learns from them. stored: drafts that the host does
    not know.
    """

    batch: Batch
    rows: StepRows
    logits: Tensor | None  # [num_rows, vocab_size]
    failed: dict[int, BlameSequence]
    trees: dict[int, DraftTree]
    seconds: float
    hidden: Tensor | None = None
    starts: np.ndarray | None = None
    stored: StoredDrafts | None = None
    made: Made = ()
    """By features' parts."""
    num_drafts: np.ndarray | None = None
    """[num_seqs] int64: drafts of sequences that run ahead, 0 of others; None: of none."""
    following: Launched | None = None
    """The step that was launched before this one was settled, if any."""
    late: LateRows | None = None
    """What sequences that run ahead are drafted for from, and accepted paths are moved by, where that is done when
    tokens are chosen."""
    early: dict[int, int] = field(default_factory=dict[int, int])
    """Drafts that were made so, by slot: for the step after this one."""
    drafting: float = 0.0  # seconds that this took


@dataclass(slots=True)
class LateRows:
    """Where the sequences of a launched step stand.

    computed: [num_seqs] int64, tokens before it, as if no draft of the step before it was rejected; num_fewer:
    [num_seqs] int64 on the device, those that were; token_ids: [num_tokens] int64, its input, and kv_places, for each
    KV group, [num_tokens] int64, where its K/V are, while no other step is prepared.

    order: [num_tokens] int64 on the device, where drafts are trees and tokens were chosen: the order in which the
    tokens stand, each tree's accepted drafts before the others; None: their own.
    """

    computed: np.ndarray
    num_fewer: Tensor
    token_ids: Tensor
    kv_places: list[Tensor]
    order: Tensor | None = None

    @classmethod
    def of(
        cls, table: SequenceTable, forward: ForwardBatch, rows: StepRows, send: Callable[[np.ndarray], Tensor]
    ) -> LateRows:
        """Of a step whose pass was launched."""
        assert rows.plan is not None
        slots = rows.plan[0]
        if forward.num_fewer is None:
            num_fewer = torch.zeros(len(slots), dtype=torch.int64, device=forward.token_ids.device)
        elif forward.is_static:
            num_fewer = forward.num_fewer.index_select(0, send(rows.query_start[:-1]))
        else:
            num_fewer = forward.num_fewer
        places = [group.slot_mapping for group in forward.kv_groups]
        return cls(table.num_computed[slots], num_fewer, forward.token_ids, places)


class Early(Protocol):
    """Told of a step as soon as its tokens are chosen, on the device.

    picked: [num_rows] int64, newest, rejected: [num_seqs] int64, each one's newest token and how many of its drafts in
    this step were rejected.
    """

    def __call__(self, step: Launched, picked: Tensor, newest: Tensor, rejected: Tensor) -> None: ...


@dataclass(slots=True)
class Pending:
    """A launched step. gone: slots that sequences have left since."""

    step: Launched
    number: int  # of its buffers
    tokens: Tensor  # [num_rows] int64 in the host's memory, once the event has come
    event: Event
    is_sampled: bool = False
    logprobs: Tensor | None = None  # [num_rows, n] int32, as ``tokens``: ``packed_logprobs``
    drafts: Tensor | None = None  # as ``tokens``: ``StoredDrafts.numbers``
    gone: set[int] = field(default_factory=set[int])
    result: StepResult | None = None


Settled = Callable[[Launched, dict[int, SequenceResult], set[int]], float]
"""Told of a step whose tokens the table has taken in, with its results and the slots that are gone by now; may put
drafts into the results. Returns the seconds that this took."""


class InFlight:
    """The launched steps of a device, oldest first.

    A sampled token is on the device at once (``newest``), where the next step's inputs find it; the table counts it
    (``SequenceTable.unknown``), and has it when its step is settled. Of a sequence with drafts even the number of new
    tokens is unknown until then: it has no part in another step, unless it runs ahead (``SequenceTable.runs_ahead``).
    Then the device counts what was rejected (``rejected``), and the next step's inputs are made with that.

    Where a logits processor reads the text, tokens are chosen when the step before is settled: nothing waits for that
    while the device is computing the model.
    """

    def __init__(
        self,
        device: Device,
        where: torch.device,
        table: SequenceTable,
        sampler: StepSampler,
        settled: Settled,
        early: Early | None = None,
        *,
        size: int,
        max_rows: int,
    ) -> None:
        self._table = table
        self._sampler = sampler
        self._settled = settled
        self._early = early
        self._device = device
        self._buffers = [(device.host_buffer((max_rows,), torch.int64), device.event()) for _ in range(size)]
        self._logprobs: list[Tensor | None] = [None] * size
        self._drafts: list[Tensor | None] = [None] * size
        self._next = 0
        self._pending: deque[Pending] = deque()
        self.newest = torch.zeros(len(table.unknown), dtype=torch.int64, device=where)
        # The last entry belongs to no slot and stays 0.
        self.rejected = torch.zeros(len(table.unknown) + 1, dtype=torch.int64, device=where)

    def ready(self) -> None:
        """Before a step is launched: tokens are chosen in all those before it. Waits only where one was left out."""
        while (
            any(not pending.is_sampled for pending in self._pending)
            or sum(pending.step.num_drafts is not None for pending in self._pending) > 1
        ):  # ``rejected`` knows the drafts of one step
            self._settle_first()

    def leave(self, slots: set[int]) -> None:
        """Sequences have left these slots: what steps in flight chose for them is written nowhere."""
        for pending in self._pending:
            pending.gone |= slots

    def add(self, step: Launched) -> Pending:
        """A step was launched; the copy of its tokens to the host is begun as soon as they can be chosen."""
        number = self._next
        host, event = self._buffers[number]
        self._next = (number + 1) % len(self._buffers)
        pending = Pending(step, number, host[: len(step.rows.slots)], event)
        waits = bool(self._pending) and step.logits is not None and self._sampler.reads_history(step.rows)
        self._count_drafts(step)
        if not waits:
            self._sample(pending)
        if step.rows.plan is not None:
            slots, num_new, samples = step.rows.plan
            num_drafts = step.num_drafts
            if step.rows.has_drafts:  # those of others count when they are verified
                plain = np.array([not s.draft_token_ids for s in step.batch.sequences])
                counts = plain | self._table.runs_ahead[slots]
                slots, num_new, samples = slots[counts], num_new[counts], samples[counts]
                num_drafts = None if num_drafts is None else num_drafts[counts]
            self._table.launch(slots, num_new, samples, num_drafts)
        self._pending.append(pending)
        return pending

    def _count_drafts(self, step: Launched) -> None:
        if step.rows.has_drafts and step.rows.plan is not None:
            counts = np.array([len(s.draft_token_ids) for s in step.batch.sequences], np.int64)
            counts[~self._table.runs_ahead[step.rows.plan[0]]] = 0
            step.num_drafts = counts if counts.any() else None

    def _accept(self, step: Launched, picked: Tensor) -> None:
        """Have the device count how many drafts of sequences that run ahead it accepts (``acceptance.accepted``)."""
        assert step.num_drafts is not None
        assert step.rows.plan is not None
        chosen = np.flatnonzero(step.num_drafts)
        trees = {} if step.stored is None else step.stored.tree_rows()
        if trees:
            is_tree = np.isin(step.rows.plan[0][chosen], list(trees))
            if is_tree.any():
                self._accept_trees(step, picked, chosen[is_tree], trees)
            chosen = chosen[~is_tree]
            if not len(chosen):
                return
        counts = step.num_drafts[chosen]
        most = int(counts.max())
        numbers = np.empty((3 + 2 * most, len(chosen)), np.int64)
        numbers[0], numbers[1] = step.rows.plan[0][chosen], counts
        first = numbers[2] = np.searchsorted(step.rows.sequences, chosen)
        nth = np.arange(most)[:, None]
        numbers[3 : 3 + most] = np.minimum(first + nth, len(step.rows.slots) - 1)
        late = step.late
        if late is None:
            drafts = np.full((len(chosen), most), -1, np.int64)  # is never picked where a token can be
            drafts[counts[:, None] > nth.T] = np.concatenate(
                [step.batch.sequences[i].draft_token_ids for i in chosen.tolist()]
            )
            numbers[3 + most :] = drafts.T
        else:  # where they stand in the step's input, and -1 past the last
            places = (step.rows.query_start[chosen + 1] - counts) + nth
            numbers[3 + most :] = np.where(nth < counts, places, -1)
        there = self._sampler.send(numbers)
        slots, drafted = there[0], there[3 + most :]
        if late is not None:
            drafted = torch.where(drafted < 0, drafted, late.token_ids[drafted.clamp(min=0)])
        agree = picked[there[3 : 3 + most]].eq_(drafted)
        num_accepted = agree.cumprod_(0).sum(0)
        self.newest.index_copy_(0, slots, picked.index_select(0, num_accepted + there[2]).clamp_(min=0))
        self.rejected.index_copy_(0, slots, num_accepted.neg_().add_(there[1]))

    def _accept_trees(self, step: Launched, picked: Tensor, chosen: np.ndarray, trees: dict[int, int]) -> None:
        """``_accept`` of trees, and the order in which their tokens then stand.

        chosen: [num_trees], places in the batch; trees: by slot, its row of ``StoredDrafts.numbers``.
        """
        assert step.num_drafts is not None
        assert step.rows.plan is not None
        assert step.stored is not None
        assert step.late is not None, "steps run ahead of trees only where their K/V are moved at launch"
        slots, counts = step.rows.plan[0][chosen], step.num_drafts[chosen]
        first = np.searchsorted(step.rows.sequences, chosen)
        begin = step.rows.query_start[chosen + 1] - counts - 1  # of the step's tokens: the last one before the drafts
        stored = np.array([trees[slot] for slot in slots.tolist()], np.int64)
        there = self._sampler.send(np.stack((slots, counts, first, begin, stored)))
        width = 1 + int(counts.max())
        owner = np.repeat(np.arange(len(chosen)), counts + 1)
        cells = _ranges(np.arange(len(chosen)) * width, counts + 1)
        at = self._sampler.send(np.stack((begin[owner] + cells - owner * width, cells)))
        rows = there[2].unsqueeze(1) + torch.arange(width, device=picked.device)
        mine = picked.index_select(0, rows.clamp_(max=len(picked) - 1).view(-1)).view(rows.shape)
        tokens, parents = step.stored.numbers.index_select(1, there[4])[:, :, : width - 1]
        order, num_accepted = accepted_in_trees(tokens, parents, there[1], mine)
        newest = mine.gather(1, order.gather(1, num_accepted.unsqueeze(1))).squeeze(1)
        self.newest.index_copy_(0, there[0], newest.clamp_(min=0))
        self.rejected.index_copy_(0, there[0], there[1] - num_accepted)
        each = (there[3].unsqueeze(1) + order).view(-1).index_select(0, at[1])
        step.late.order = torch.arange(len(step.late.token_ids), device=picked.device).index_copy_(0, at[0], each)

    def settle(self, until: Pending | None = None) -> None:
        """Wait for the steps up to one, or for all, and take in their tokens."""
        while self._pending and (until is None or until.result is None):
            self._settle_first()

    def _sample(self, pending: Pending) -> None:
        """Give the device the choice of a step's tokens, and their copy to the host."""
        step = pending.step
        picked: Tensor | None = None
        if step.logits is not None:
            picked = self._sampler.pick(step.batch, step.rows, step.logits, step.failed, step.trees)
            slots = step.rows.slots_on_device
            assert slots is not None
            self.newest.index_copy_(0, slots, picked.clamp(min=0))
            if step.num_drafts is not None:
                self._accept(step, picked)
            pending.tokens.copy_(picked, non_blocking=True)
            if step.rows.sampling_state(self._table).wants_logprobs:
                most = max(int(self._table.logprobs[step.rows.slots].max()), 1)
                packed = packed_logprobs(step.logits, picked, most)
                pending.logprobs = self._copied(self._logprobs, pending.number, packed)
            step.logits = None
        if step.stored is not None:
            pending.drafts = self._copied(self._drafts, pending.number, step.stored.numbers)
        pending.event.record()
        pending.is_sampled = True
        if self._early is not None and step.late is not None:
            assert step.rows.plan is not None
            slots, num_drafts = step.rows.plan[0], step.num_drafts
            mine = np.full(len(slots), self._table.null_slot) if num_drafts is None else np.where(
                num_drafts > 0, slots, self._table.null_slot
            )  # fmt: skip
            both = self._sampler.send(np.stack((slots, mine)))
            newest, rejected = self.newest.index_select(0, both[0]), self.rejected.index_select(0, both[1])
            self._early(step, newest if picked is None else picked, newest, rejected)

    def _copied(self, kept: list[Tensor | None], number: int, values: Tensor) -> Tensor:
        """Begin a copy to the host, into memory that this step's turn keeps for it."""
        memory = kept[number]
        if memory is None or memory.numel() < values.numel():
            memory = kept[number] = self._device.host_buffer((2 * values.numel(),), values.dtype)
        return memory[: values.numel()].view(values.shape).copy_(values, non_blocking=True)

    @torch.inference_mode()
    def _settle_first(self) -> None:
        pending = self._pending.popleft()
        pending.event.wait()
        results = self._plain_results(pending) or self._results(pending)
        if self._pending and not self._pending[0].is_sampled:
            self._sample(self._pending[0])
        step = pending.step
        step.following = self._pending[0].step if self._pending else None
        drafting = self._settled(step, results, pending.gone) + step.drafting
        total = step.seconds + drafting
        pending.result = StepResult(step.batch.step, list(results.values()), step.seconds, total, drafting)

    def _results(self, pending: Pending) -> dict[int, SequenceResult]:
        """By slot, of the sequences that sample, fail, or of which features' parts have something to tell."""
        step = pending.step
        if step.stored is not None and pending.drafts is not None:
            step.trees |= step.stored.learn(pending.drafts)
        results: dict[int, SequenceResult] = {}
        asked: list[tuple[SequenceResult, list[int]]] = []  # whose log-probabilities are wanted, and their rows
        picked = pending.tokens.tolist()
        row = 0
        for scheduled in step.batch.sequences:
            slot = scheduled.slot
            first, row = row, row + (1 + len(scheduled.draft_token_ids) if scheduled.samples else 0)
            mine = picked[first:row]
            if slot in pending.gone:
                if mine:
                    results[slot] = SequenceResult(slot, [max(mine[0], 0)])  # nobody waits for it any more
                continue
            result, rows = self._result(scheduled, mine, first, step)
            if result is not None:
                results[slot] = result
                if mine and result.error is None and self._table.logprobs[slot] >= 0:
                    asked.append((result, rows[: len(result.token_ids)]))
        if pending.logprobs is not None:
            self._add_logprobs(asked, pending.logprobs, picked)
        put_results(step.made, results, pending.gone)
        return results

    def _plain_results(self, pending: Pending) -> dict[int, SequenceResult] | None:
        """Those of a step in which sequences gained tokens, of chains if of drafts, and nobody asked for more.

        None of any other step.
        """
        step = pending.step
        rows = step.rows
        if step.failed or pending.gone or pending.logprobs is not None or step.made:
            return None
        picked = pending.tokens.numpy()
        if not len(picked) or picked.min() < 0:
            return None
        if rows.has_drafts:
            return self._chain_results(pending, picked)
        if len(rows.slots) != len(step.batch.sequences):
            return None
        self._table.settle(rows.slots, picked)
        return self._sampler.settled_each(rows.slots.tolist(), picked.tolist())

    def _chain_results(self, pending: Pending, picked: np.ndarray) -> dict[int, SequenceResult] | None:
        """``_plain_results`` of a step with drafts, of which ``picked`` [num_rows] was picked."""
        step = pending.step
        rows = step.rows
        if rows.plan is None or step.trees or self._sampler.may_end(rows):
            return None
        if step.stored is not None and pending.drafts is not None:
            if any(step.stored.are_trees):
                return None
            step.stored.learn(pending.drafts)
        slots, num_new, _ = rows.plan
        counts = np.bincount(rows.sequences, minlength=len(slots))  # rows of each sequence; none of a prompt's chunk
        first = np.cumsum(counts) - counts
        plain, drafted = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        self._table.settle(slots[plain], picked[first[plain]])
        num_drafts = counts[drafted] - 1
        drafts = np.concatenate([step.batch.sequences[i].draft_token_ids for i in drafted.tolist()])
        gained = count_gained(drafts, picked[_ranges(first[drafted], num_drafts)], num_drafts)
        tokens = picked[_ranges(first[drafted], gained)]
        if step.num_drafts is None:
            self._table.settle_chains(slots[drafted], num_new[drafted], num_drafts, gained, tokens)
        else:
            ahead = self._table.runs_ahead[slots[drafted]]
            of_each = np.repeat(ahead, gained)
            if ahead.any():
                self._table.settle_ahead(slots[drafted[ahead]], num_drafts[ahead], gained[ahead], tokens[of_each])
            rest = drafted[~ahead]
            if len(rest):
                self._table.settle_chains(
                    slots[rest], num_new[rest], num_drafts[~ahead], gained[~ahead], tokens[~of_each]
                )
        stand = np.minimum(counts, 1)
        stand[drafted] = gained
        mine = picked.tolist()
        return {
            slot: SequenceResult(slot, mine[start : start + count])
            for slot, start, count in zip(slots.tolist(), first.tolist(), stand.tolist(), strict=True)
            if count
        }

    def _result(
        self, scheduled: ScheduledSequence, picked: list[int], row: int, step: Launched
    ) -> tuple[SequenceResult | None, list[int]]:
        """The result of a sequence, none for a chunk of a prompt, and the rows it stands on; the table takes it in."""
        slot = scheduled.slot
        if scheduled.draft_token_ids:
            return self._sampler.verified(scheduled, picked, row, step.failed, step.trees.get(slot))
        if picked:
            place = int(self._table.num_tokens[slot] - self._table.unknown[slot])
            self._table.token_ids[slot, place] = max(picked[0], 0)
            self._table.unknown[slot] -= 1
        return self._sampler.settled(slot, picked[0] if picked else None, step.failed), [row]

    def _add_logprobs(self, asked: list[tuple[SequenceResult, list[int]]], packed: Tensor, picked: list[int]) -> None:
        rows = [row for _, mine in asked for row in mine]
        num_top = [int(self._table.logprobs[result.slot]) for result, mine in asked for _ in mine]
        found = iter(unpacked_logprobs(packed[rows], [picked[row] for row in rows], num_top))
        for result, mine in asked:
            result.logprobs = [next(found) for _ in mine]


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each of ``starts`` [n], as many as ``counts`` [n] says: [sum of counts] int64."""
    return np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
