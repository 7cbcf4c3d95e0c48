"""Steps that a device was given and whose tokens the host has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fwk.features.worker import put_results
from fwk.interfaces.device import Device, Event
from fwk.interfaces.drafting import Drafting
from fwk.interfaces.logprobs import packed_logprobs, unpacked_logprobs
from fwk.interfaces.step import LaunchedStep
from fwk.types import ScheduledSequence, SequenceResult, StepResult
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.step_sampler import StepSampler


@dataclass(slots=True)
class Pending:
    """A launched step. gone: slots that sequences have left since."""

    step: LaunchedStep
    number: int  # of its buffers
    tokens: Tensor  # [num_rows] int64 in the host's memory, once the event has come
    event: Event
    is_sampled: bool = False
    logprobs: Tensor | None = None  # [num_rows, n] int32, as ``tokens``: ``packed_logprobs``
    numbers: Tensor | None = None  # as ``tokens``: ``LaunchedStep.numbers``
    gone: set[int] = field(default_factory=set[int])
    result: StepResult | None = None


Settled = Callable[[LaunchedStep, dict[int, SequenceResult], set[int]], float]
"""Told of a step whose tokens the table has taken in, with its results and the slots that are gone by now; may put
drafts into the results. Returns the seconds that this took."""


class InFlight:
    """The launched steps of a device, oldest first.

    A sampled token is on the device at once (``newest``), where the next step's inputs find it; the table counts it
    (``SequenceTable.unknown``), and has it when its step is settled. Of a sequence with drafts even the number of new
    tokens is unknown until then: it has no part in another step, unless it runs ahead (``Drafting``).

    Where a logits processor reads the text, tokens are chosen when the step before is settled: nothing waits for that
    while the device is computing the model.
    """

    def __init__(
        self,
        device: Device,
        where: torch.device,
        table: SequenceTable,
        sampler: StepSampler,
        drafting: Drafting,
        settled: Settled,
        *,
        size: int,
        max_rows: int,
    ) -> None:
        self._table = table
        self._sampler = sampler
        self._settled = settled
        self._drafting = drafting
        self._device = device
        self._buffers = [(device.host_buffer((max_rows,), torch.int64), device.event()) for _ in range(size)]
        self._logprobs: list[Tensor | None] = [None] * size
        self._numbers: list[Tensor | None] = [None] * size
        self._next = 0
        self._pending: deque[Pending] = deque()
        self.newest = torch.zeros(len(table.unknown), dtype=torch.int64, device=where)

    def ready(self) -> None:
        """Before a step is launched: tokens are chosen in all those before it. Waits only where one was left out."""
        while (
            any(not pending.is_sampled for pending in self._pending)
            or sum(pending.step.num_ahead is not None for pending in self._pending) > 1
        ):  # the device knows what was rejected of one step
            self._settle_first()

    def leave(self, slots: set[int]) -> None:
        """Sequences have left these slots: what steps in flight chose for them is written nowhere."""
        for pending in self._pending:
            pending.gone |= slots

    def add(self, step: LaunchedStep) -> Pending:
        """A step was launched; the copy of its tokens to the host is begun as soon as they can be chosen."""
        number = self._next
        host, event = self._buffers[number]
        self._next = (number + 1) % len(self._buffers)
        pending = Pending(step, number, host[: len(step.rows.slots)], event)
        waits = bool(self._pending) and step.logits is not None and self._sampler.reads_history(step.rows)
        if not waits:
            self._sample(pending)
        if step.rows.plan is not None:
            self._table.launch(*(self._drafting.count(step) if step.rows.has_drafts else step.rows.plan))
        self._pending.append(pending)
        return pending

    def settle(self, until: Pending | None = None) -> None:
        """Wait for the steps up to one, or for all, and take in their tokens."""
        while self._pending and (until is None or until.result is None):
            self._settle_first()

    def _sample(self, pending: Pending) -> None:
        """Give the device the choice of a step's tokens, and their copy to the host."""
        step = pending.step
        picked: Tensor | None = None
        if step.logits is not None:
            picked = self._sampler.pick(step, step.logits)
            slots = step.rows.slots_on_device
            assert slots is not None
            self.newest.index_copy_(0, slots, picked.clamp(min=0))
            if step.num_ahead is not None:
                self._drafting.accept(step, picked, self.newest)
            pending.tokens.copy_(picked, non_blocking=True)
            if step.rows.sampling_state(self._table).wants_logprobs:
                most = max(int(self._table.logprobs[step.rows.slots].max()), 1)
                packed = packed_logprobs(step.logits, picked, most)
                pending.logprobs = self._copied(self._logprobs, pending.number, packed)
            step.logits = None
        if step.numbers is not None:
            pending.numbers = self._copied(self._numbers, pending.number, step.numbers)
        pending.event.record()
        pending.is_sampled = True
        self._drafting.chosen(step, picked, self.newest)

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
        if pending.numbers is not None:
            self._drafting.arrived(pending.step, pending.numbers)
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
            return self._drafting.chains(step, picked)
        if len(rows.slots) != len(step.batch.sequences):
            return None
        self._table.settle(rows.slots, picked)
        return self._sampler.settled_each(rows.slots.tolist(), picked.tolist())

    def _result(
        self, scheduled: ScheduledSequence, picked: list[int], row: int, step: LaunchedStep
    ) -> tuple[SequenceResult | None, list[int]]:
        """The result of a sequence, none for a chunk of a prompt, and the rows it stands on; the table takes it in."""
        slot = scheduled.slot
        if scheduled.draft_token_ids:
            return self._sampler.verified(step, scheduled, picked, row)
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
