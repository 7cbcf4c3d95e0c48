"""The model runner: one forward pass, from batch to result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fwk.features import worker as features
from fwk.interfaces.drafting import Drafting
from fwk.interfaces.parallel import Stage
from fwk.interfaces.step import LaunchedStep
from fwk.types import Batch, ForwardBatch, SequenceResult, StepResult
from fwk.worker.graphs.captures import Captures
from fwk.worker.graphs.step_graphs import StepModel
from fwk.worker.kv.states import StateStore
from fwk.worker.runner.in_flight import InFlight, Pending, Settled
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.members import Members
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.runner.stage_tokens import StageTokens
from fwk.worker.runner.uploads import Uploads
from fwk.worker.sampling.pipeline import SamplingPipeline
from fwk.worker.sampling.step_sampler import StepSampler


class ModelRunner:
    """Turns a ``Batch`` into a ``StepResult``: begin, forward, sample, propose.

    State between steps is in the table; inputs are in the buffers.
    """

    def __init__(  # noqa: PLR0913 - the parts of a step
        self,
        *,
        model: StepModel,
        plan_attention: Callable[[ForwardBatch], Any],
        states: StateStore | None,
        table: SequenceTable,
        inputs: InputBuffers,
        sampling: SamplingPipeline,
        drafting: Drafting,
        in_flight: Callable[[StepSampler, Drafting, Settled], InFlight] | None = None,
        uploads: Uploads | None = None,
        num_captured: int = 0,
        stage: Stage | None = None,
    ) -> None:
        """in_flight: what keeps steps that are not waited for; None where a step is done when it was launched.

        uploads: what a step sends to the device besides its inputs goes through them.

        num_captured: as in ``Captures``. stage: of several; None: all layers are here.
        """
        self.model = model
        self._plan_attention = plan_attention
        self._states = states
        self._table = table
        self._inputs = inputs
        self._sampling = sampling
        self._drafting = drafting
        self._sampler = StepSampler(table, sampling, drafting)
        self._stage = None if stage is None else StageTokens(self._sampler, table, stage)
        self.captures = Captures(lambda: self.model, inputs, self._planned, num_captured)
        self._uploads = uploads
        self._in_flight = in_flight(self._sampler, drafting, self._settled) if in_flight is not None else None
        if self._in_flight is not None:
            inputs.newest = self._in_flight.newest
        self._members = Members(table, states, sampling, drafting)

    @property
    def depth(self) -> int:
        """Steps it gains from having in flight; with drafts that follow from the result of the step before, one."""
        return 1 if self._in_flight is None or (self._drafting.max_drafts and not self._drafting.runs_ahead) else 2

    def launch(self, batch: Batch) -> StepResult | Pending:
        """Begin a step; the result itself where nothing is gained from waiting for it later."""
        if self._in_flight is None:
            return self.execute(batch)
        with torch.inference_mode():
            return self._launch(batch, self._in_flight)

    def collect(self, pending: StepResult | Pending) -> StepResult:
        """The result of a launched step; those before it are waited for, too."""
        if isinstance(pending, StepResult):
            return pending
        assert self._in_flight is not None
        self._in_flight.settle(pending)
        assert pending.result is not None
        return pending.result

    def settle(self) -> None:
        """Wait for every launched step, so that the host knows all there is to know."""
        if self._in_flight is not None:
            self._in_flight.settle()

    def _launch(self, batch: Batch, in_flight: InFlight) -> Pending:
        """Begin a step, and wait for nothing."""
        started = time.perf_counter()
        in_flight.ready()
        if self._uploads is not None:
            self._uploads.turn()
        in_flight.leave({*batch.freed_slots, *(new.slot for new in batch.new)})
        step, forward = self._pass(batch)
        self._drafting.computed(step, forward)
        pending = in_flight.add(step)
        step.seconds = time.perf_counter() - started - step.drafting
        return pending

    def _pass(self, batch: Batch) -> tuple[LaunchedStep, ForwardBatch]:
        """All of a step but the choice of tokens, and its inputs."""
        failed = self._members.begin(batch)
        forward, rows = self._inputs.prepare(batch, self._drafting.trees(batch))
        step = LaunchedStep(batch, rows, failed)
        self._drafting.enter(step, forward)
        started = time.perf_counter()
        forward.is_greedy = self._sampling.is_greedy(rows)
        features.inputs(rows.parts, batch, forward)
        hidden, step.logits = self.model.run(self._planned(forward))
        if self._states is not None:
            self._states.save(batch)
        is_whole = self._stage is None or self._stage.has_output
        if rows.parts and is_whole:
            step.made = features.computed(rows.parts, batch, forward, self._own(hidden), step.logits)
        step.seconds = time.perf_counter() - started
        if self._drafting.reads_hidden:
            step.hidden = hidden
        return step, forward

    def _own(self, hidden: Tensor) -> Tensor:
        """What logits are made of, of what ``StepModel.run`` returns."""
        return hidden.chunk(1 + self._drafting.num_taps, 1)[0]

    def _settled(self, step: LaunchedStep, results: dict[int, SequenceResult], gone: set[int]) -> float:
        """What follows from a launched step's tokens: states that are taken back, and drafts for the next one."""
        started = time.perf_counter()
        sampled = [s for s in step.batch.sequences if s.samples and s.slot not in gone]
        if self._states is not None:
            for scheduled in sampled:
                if self._table.is_undone(scheduled, results[scheduled.slot].token_ids):
                    self._states.undo(scheduled.slot)
        self._drafting.settled(step, sampled, results)
        return time.perf_counter() - started

    @torch.inference_mode()
    def forget(self, slots: list[int]) -> None:
        """Sequences leave their slots, without the step that would say so."""
        self.settle()
        self._members.begin(Batch(0, slots, [], []))

    def replace_drafts(self, slots: list[int]) -> None:
        """Others than the decoder's are verified of these."""
        for slot in slots:
            self._drafting.replace(slot)

    def execute(self, batch: Batch) -> StepResult:
        """Run one step."""
        if torch.is_inference_mode_enabled():  # set once by an engine process: entering it costs as much as the inputs
            return self._execute(batch)
        with torch.inference_mode():
            return self._execute(batch)

    def _execute(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        if self._stage is not None:
            self._stage.begin(batch)
        step, forward = self._pass(batch)
        computed = time.perf_counter()
        self._drafting.computed(step, forward)
        drafting = time.perf_counter() - computed
        results = (self._stage or self._sampler).sample(step)
        features.put_results(step.made, results)
        drafting += self._settled(step, results, set())
        return StepResult(batch.step, list(results.values()), step.seconds, time.perf_counter() - started, drafting)

    def _planned(self, forward: ForwardBatch) -> ForwardBatch:
        """The same batch, with attention planned."""
        forward.plan = self._plan_attention(forward)
        return forward
