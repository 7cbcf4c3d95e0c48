"""Tokens on their way from the last stage, which chooses them, to the first, which embeds them."""

from __future__ import annotations

from collections import deque

import torch

from fwk.interfaces.parallel import Stage
from fwk.interfaces.step import LaunchedStep
from fwk.types import Batch, ScheduledSequence, SequenceResult
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.step_sampler import StepSampler


class StageTokens:
    """In the place of ``StepSampler`` in one of several stages; no sequence has drafts.

    The first stage waits for tokens when a step needs them, and computes other steps meanwhile. Those in between need
    none: their tables count tokens.
    """

    def __init__(self, sampler: StepSampler, table: SequenceTable, stage: Stage) -> None:
        self._sampler = sampler
        self._table = table
        self._stage = stage
        self._coming: deque[list[ScheduledSequence | None]] = deque()
        """By step, oldest first: who gains its tokens, in their order; None: it has left its slot."""
        self._waiting: set[int] = set()
        """Slots that are in ``_coming``."""
        self.has_output = stage.is_last
        """Whether what the model makes here is its output, for logits and parts of features."""

    def begin(self, batch: Batch) -> None:
        """Before a step is prepared: take in what its sequences have gained."""
        if not self._waiting:
            return
        left = self._waiting.intersection([*batch.freed_slots, *(new.slot for new in batch.new)])
        for step in self._coming if left else ():
            step[:] = [None if one is not None and one.slot in left else one for one in step]
        self._waiting -= left
        wanted = [scheduled.slot for scheduled in batch.sequences]
        while not self._waiting.isdisjoint(wanted):
            step = self._coming.popleft()
            for scheduled, token in zip(step, self._stage.receive_tokens(len(step)).tolist(), strict=True):
                if scheduled is not None:
                    self._table.finish(scheduled, [token])
                    self._waiting.discard(scheduled.slot)

    def sample(self, step: LaunchedStep) -> dict[int, SequenceResult]:
        """As ``StepSampler.sample``; the results of other stages than the last say nothing."""
        batch = step.batch
        chosen = [scheduled for scheduled in batch.sequences if scheduled.samples]
        if self._stage.is_last:
            results = self._sampler.sample(step)
            if chosen:
                self._stage.send_tokens(torch.tensor([sum(results[s.slot].token_ids[:1]) for s in chosen]))
            return results
        later = chosen if self._stage.is_first else []
        if later:
            self._coming.append([*later])
            self._waiting.update(scheduled.slot for scheduled in later)
        for scheduled in batch.sequences:
            if not (scheduled.samples and self._stage.is_first):
                self._table.finish(scheduled, [0] if scheduled.samples else [])
        return {scheduled.slot: SequenceResult(scheduled.slot, [0]) for scheduled in chosen}
