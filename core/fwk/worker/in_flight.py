"""Steps that a device was given and whose tokens the host has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.device import Device, Event
from fwk.types import Batch, SequenceResult, StepResult, TokenLogprobs
from fwk.worker.inputs import StepRows
from fwk.worker.logprobs import packed_logprobs, unpacked_logprobs
from fwk.worker.sequence_table import SequenceTable
from fwk.worker.step_sampler import StepSampler


@dataclass(slots=True)
class Pending:
    """A launched step.

    failed: slots that a processor has refused, and why. gone: slots that sequences have left since.
    """

    batch: Batch
    rows: StepRows
    failed: dict[int, BlameSequence]
    launch_seconds: float
    tokens: Tensor  # [num_rows] int64 in the host's memory, once the event has come
    event: Event
    logprobs: Tensor | None = None  # [num_rows, n] int32, as ``tokens``: ``packed_logprobs``
    gone: set[int] = field(default_factory=set[int])
    result: StepResult | None = None


class InFlight:
    """The launched steps of a device, oldest first.

    A sampled token is on the device at once (``newest``), where the next step's inputs find it; the table counts it
    (``SequenceTable.unknown``), and has it when its step is settled.
    """

    def __init__(
        self,
        device: Device,
        where: torch.device,
        table: SequenceTable,
        sampler: StepSampler,
        *,
        size: int,
        max_rows: int,
    ) -> None:
        self._table = table
        self._sampler = sampler
        self._device = device
        self._buffers = [(device.host_buffer((max_rows,), torch.int64), device.event()) for _ in range(size)]
        self._logprobs: list[Tensor | None] = [None] * size
        self._next = 0
        self._pending: deque[Pending] = deque()
        self.newest = torch.zeros(len(table.unknown), dtype=torch.int64, device=where)

    def leave(self, slots: set[int]) -> None:
        """Sequences have left these slots: what steps in flight chose for them is written nowhere."""
        for pending in self._pending:
            pending.gone |= slots

    def add(
        self,
        batch: Batch,
        rows: StepRows,
        picked: Tensor | None,
        failed: dict[int, BlameSequence],
        seconds: float,
        logits: Tensor | None = None,
    ) -> Pending:
        """A step was launched, which picked a token for each row; its copy to the host is begun.

        logits: [num_rows, vocab_size], where the log-probability of a row's token is wanted.
        """
        number = self._next
        host, event = self._buffers[number]
        self._next = (number + 1) % len(self._buffers)
        tokens = host[: len(rows.slots)]
        logprobs = None
        if picked is not None and rows.slots_on_device is not None:
            self.newest.index_copy_(0, rows.slots_on_device, picked.clamp(min=0))
            tokens.copy_(picked, non_blocking=True)
            if logits is not None:
                most = max(int(self._table.logprobs[rows.slots].max()), 1)
                logprobs = self._sent(number, packed_logprobs(logits, picked, most))
        event.record()
        for scheduled in batch.sequences:
            self._table.finish(scheduled, [0] if scheduled.samples else [])
            self._table.unknown[scheduled.slot] += scheduled.samples
        pending = Pending(batch, rows, failed, seconds, tokens, event, logprobs)
        self._pending.append(pending)
        return pending

    def _sent(self, number: int, packed: Tensor) -> Tensor:
        """Begin to copy what the host reads with a step's tokens, to memory that stays until it has."""
        kept = self._logprobs[number]
        if kept is None or kept.numel() < packed.numel():
            kept = self._logprobs[number] = self._device.host_buffer((2 * packed.numel(),), torch.int32)
        host = kept[: packed.numel()].view(packed.shape)
        return host.copy_(packed, non_blocking=True)

    def settle(self, until: Pending | None = None) -> None:
        """Wait for the steps up to one, or for all, and take in their tokens."""
        while self._pending and (until is None or until.result is None):
            pending = self._pending.popleft()
            pending.event.wait()
            pending.result = StepResult(
                pending.batch.step, self._results(pending), pending.launch_seconds, pending.launch_seconds
            )

    def _results(self, pending: Pending) -> list[SequenceResult]:
        results: list[SequenceResult] = []
        picked = pending.tokens.tolist()
        tokens, found = iter(picked), self._logprobs_of(pending, picked)
        for scheduled in pending.batch.sequences:
            slot = scheduled.slot
            token = next(tokens) if scheduled.samples else None
            logprobs = next(found, None) if scheduled.samples else None
            if slot in pending.gone:
                if token is not None:
                    results.append(SequenceResult(slot, [max(token, 0)]))  # nobody waits for it any more
                continue
            if token is not None:
                place = int(self._table.num_tokens[slot] - self._table.unknown[slot])
                self._table.token_ids[slot, place] = max(token, 0)
                self._table.unknown[slot] -= 1
            result = self._sampler.settled(slot, token, pending.failed)
            if result is not None:
                if logprobs is not None and result.error is None and self._table.logprobs[slot] >= 0:
                    result.logprobs = [logprobs][: len(result.token_ids)]
                results.append(result)
        return results

    def _logprobs_of(self, pending: Pending, picked: list[int]) -> Iterator[TokenLogprobs]:
        """Of each row; of none where nobody asked."""
        if pending.logprobs is None:
            return iter(())
        num_top = [max(int(n), 0) for n in self._table.logprobs[pending.rows.slots]]
        return iter(unpacked_logprobs(pending.logprobs, picked, num_top))
