"""The model runner: one forward pass, from batch to result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fwk.features import worker as features
from fwk.interfaces.parallel import Stage
from fwk.types import Batch, ForwardBatch, SequenceResult, StepResult
from fwk.worker.drafting.drafting import NoDrafting
from fwk.worker.drafting.verify import Verifier
from fwk.worker.graphs.captures import Captures
from fwk.worker.graphs.step_graphs import StepModel
from fwk.worker.kv.states import StateStore
from fwk.worker.runner.in_flight import Early, InFlight, LateRows, Launched, Pending, Settled
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
        drafting: NoDrafting,
        in_flight: Callable[[StepSampler, Settled, Early | None], InFlight] | None = None,
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
        self._sampler = StepSampler(table, sampling, Verifier(table, sampling, drafting))
        self._stage = None if stage is None else StageTokens(self._sampler, table, stage)
        self.captures = Captures(lambda: self.model, inputs, self._planned, num_captured)
        self._uploads = uploads
        early = self._drafting.draft_early if self._drafting.is_early or self._drafting.moves_early else None
        self._in_flight = in_flight(self._sampler, self._settled, early) if in_flight is not None else None
        if self._in_flight is not None:
            inputs.newest, inputs.rejected = self._in_flight.newest, self._in_flight.rejected
            inputs.max_accepted = drafting.max_levels
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
        step, forward, hidden = self._pass(batch)
        self._drafting.follow(forward)
        if self._drafting.is_early or (self._drafting.moves_early and step.stored is not None):
            step.late = LateRows.of(self._table, forward, step.rows, self._sampling.send)
            assert step.rows.plan is not None
            if step.hidden is not None and not self._table.runs_ahead[step.rows.plan[0]].all():
                step.hidden = hidden.clone()  # some is read when the step is collected, and another was launched then
        pending = in_flight.add(step)
        step.seconds = time.perf_counter() - started - step.drafting
        return pending

    def _pass(self, batch: Batch) -> tuple[Launched, ForwardBatch, Tensor]:
        """All of a step but the choice of tokens; its inputs, and what ``StepModel.run`` returns."""
        failed = self._members.begin(batch)
        trees = self._drafting.trees(batch.sequences)
        has_trees = bool(trees) or self._drafting.has_hidden_trees(batch.sequences)
        forward, rows = self._inputs.prepare(batch, trees, has_trees=has_trees)
        stored = self._drafting.enter(batch, forward, rows)
        started = time.perf_counter()
        forward.is_greedy = self._sampling.is_greedy(rows)
        features.inputs(rows.parts, batch, forward)
        hidden, logits = self.model.run(self._planned(forward))
        if self._states is not None:
            self._states.save(batch)
        is_whole = self._stage is None or self._stage.has_output
        made = (
            features.computed(rows.parts, batch, forward, self._own(hidden), logits) if rows.parts and is_whole else ()
        )
        step = Launched(batch, rows, logits, failed, trees, time.perf_counter() - started, stored=stored, made=made)
        if self._drafting.reads_hidden:
            step.hidden, step.starts = hidden, rows.query_start
        return step, forward, hidden

    def _own(self, hidden: Tensor) -> Tensor:
        """What logits are made of, of what ``StepModel.run`` returns."""
        return hidden.chunk(1 + self._drafting.num_taps, 1)[0]

    def _settled(self, step: Launched, results: dict[int, SequenceResult], gone: set[int]) -> float:
        """What follows from a launched step's tokens: states that are taken back, and drafts for the next one."""
        started = time.perf_counter()
        batch = step.batch
        sampled = [s for s in batch.sequences if s.samples and s.slot not in gone]
        if self._states is not None:
            for scheduled in sampled:
                if self._table.is_undone(scheduled, results[scheduled.slot].token_ids):
                    self._states.undo(scheduled.slot)
        if step.starts is not None and step.hidden is not None:
            computed = None if step.late is None else step.late.computed
            self._drafting.learn(batch, step.starts, step.hidden, results, step.trees, computed)
        going_on = [s for s in sampled if results[s.slot].goes_on]
        following = step.following
        self._drafting.draft(going_on, results, None if following is None else following.batch)
        for scheduled in going_on if step.early else ():
            slot = scheduled.slot
            if slot in step.early:  # those that come after the newest step
                newest = step if following is None or slot not in following.early else following
                results[slot].draft_token_ids = [0] * newest.early[slot]
        if self._members.to_tell:
            self._members.tell(results)
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
        step, forward, _ = self._pass(batch)
        computed = time.perf_counter()
        self._drafting.follow(forward)
        drafting = time.perf_counter() - computed
        results = (self._stage or self._sampler).sample(batch, step.rows, step.logits, step.failed, step.trees)
        features.put_results(step.made, results)
        drafting += self._settled(step, results, set())
        return StepResult(batch.step, list(results.values()), step.seconds, time.perf_counter() - started, drafting)

    def _planned(self, forward: ForwardBatch) -> ForwardBatch:
        """The same batch, with attention planned."""
        forward.plan = self._plan_attention(forward)
        return forward
