"""The runner of a model that does not generate: what comes of its prompts is made by features' parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fwk.features import worker as features
from fwk.interfaces.drafting import Drafting
from fwk.interfaces.model import Encoder, Model
from fwk.types import Batch, ForwardBatch, SequenceResult, StepResult
from fwk.worker.kv.states import StateStore
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.members import Members
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.step_sampler import failure


class PromptRunner:
    """Turns a ``Batch`` of prompts into a ``StepResult`` for those whose last token is in it.

    An encoder keeps nothing, and its prompts are whole; a decoder's K/V are in the cache.
    """

    def __init__(
        self,
        *,
        model: Model | Encoder,
        plan_attention: Callable[[ForwardBatch], Any],
        states: StateStore | None,
        table: SequenceTable,
        inputs: InputBuffers,
        wait: Callable[[], None],
    ) -> None:
        """wait: for what the device has been given to do."""
        self.model = model
        self._plan_attention = plan_attention
        self._states = states
        self._table = table
        self._members = Members(table, states, None, Drafting())
        self._inputs = inputs
        self._wait = wait

    depth = 1

    def launch(self, batch: Batch) -> StepResult:
        """Run a step: what comes of it is read at once."""
        return self.execute(batch)

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def settle(self) -> None:
        """No step is in flight."""

    def forget(self, slots: list[int]) -> None:
        """Sequences leave their slots, without the step that would say so."""
        self._members.begin(Batch(0, slots, [], []))

    def replace_drafts(self, slots: list[int]) -> None:
        """Nothing is drafted."""

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step."""
        started = time.perf_counter()
        failed = self._members.begin(batch)
        forward, rows = self._inputs.prepare(batch)
        forward.plan = self._plan_attention(forward)
        features.inputs(rows.parts, batch, forward)
        launched = time.perf_counter()
        hidden = self.model.forward(forward)
        if self._states is not None:
            self._states.save(batch)
        made = features.computed(rows.parts, batch, forward, hidden, None)
        self._wait()
        computed = time.perf_counter()
        results: dict[int, SequenceResult] = {}
        for scheduled in batch.sequences:
            self._table.finish(scheduled, [])
            if scheduled.samples:
                results[scheduled.slot] = SequenceResult(scheduled.slot, [])
        results |= {slot: failure(error) for slot, error in failed.items() if slot in results}
        features.put_results(made, results)
        return StepResult(batch.step, list(results.values()), computed - launched, time.perf_counter() - started)
