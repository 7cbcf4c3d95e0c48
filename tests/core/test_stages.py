"""Stages of a model: which layers they have, how their steps share the sequences, and how tokens come to the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.engine_machine import assert_idle, prompts, request, run
from tests.helpers.ranks import FakeStage

from fwk.config import EngineOptions
from fwk.interfaces.parallel import Stage
from fwk.interfaces.step import LaunchedStep
from fwk.types import Batch, NewSequence, SamplingParams, ScheduledSequence, SequenceResult
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.runner.stage_tokens import StageTokens
from fwk_kit.testing.fake_engine import FakeExecutor, make_engine, reference


@pytest.mark.parametrize(("num_layers", "count"), [(4, 1), (4, 2), (5, 2), (7, 3), (3, 3), (61, 8)])
def test_every_layer_is_in_one_stage_and_earlier_ones_have_more(num_layers: int, count: int) -> None:
    ranges = [FakeStage(index, count).layers(num_layers) for index in range(count)]
    assert [layer for one in ranges for layer in one] == list(range(num_layers))
    sizes = [len(one) for one in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] >= sizes[-1]


def test_one_stage_hands_nothing_on() -> None:
    with pytest.raises(NotImplementedError):
        Stage().send_hidden(torch.zeros(1, 2))


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(("step", "chunk"), [(16, 5), (64, None)])
def test_outputs_do_not_depend_on_stages(num_stages: int, step: int, chunk: int | None) -> None:
    """With few blocks sequences are pre-empted while a step of theirs is under way."""
    engine = make_engine(depth=num_stages, num_stages=num_stages, step_tokens=step, chunk_tokens=chunk, num_blocks=24)
    for i, prompt in enumerate(prompts(12, shared=11)):
        assert engine.add(request(f"r{i}", prompt, max_tokens=9)) == []
    outputs = run(engine)
    for i, prompt in enumerate(prompts(12, shared=11)):
        assert outputs[f"r{i}", 0] == reference(prompt, 9)
    assert engine.stats().preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize(("limits", "most"), [({}, 2), ({"max_micro_batch": 1}, 1)])
def test_sequences_are_divided_among_as_many_steps_as_stages(limits: dict[str, Any], most: int) -> None:
    engine = make_engine(depth=3, num_stages=3, step_tokens=64, cache="none", **limits)
    for i in range(6):
        engine.add(request(f"r{i}", [i, 1, 2], max_tokens=20))
    run(engine)
    assert isinstance(engine.executor, FakeExecutor)
    batches = [{s.slot for s in batch.sequences if s.samples} for batch in engine.executor.worker.batches]
    steady = batches[6:30]
    assert all(len(batch) == most for batch in steady)
    for before, after, last in zip(steady, steady[1:], steady[2:], strict=False):
        assert not before & after
        assert not (before | after) & last


def _new(slot: int) -> NewSequence:
    return NewSequence(slot, [7, 8], 2, 0, [], SamplingParams(), 0)


def _step(number: int, *slots: int, new: tuple[int, ...] = (), freed: tuple[int, ...] = ()) -> Batch:
    sequences = [ScheduledSequence(slot, 2 if slot in new else 1, True, [slot + 1], []) for slot in slots]
    return Batch(number, list(freed), [_new(slot) for slot in new], sequences)


class Sampler:
    """Picks what the test says, in the last stage."""

    def __init__(self, table: SequenceTable, picks: list[list[int]]) -> None:
        self._table, self._picks = table, picks

    def sample(self, step: LaunchedStep) -> dict[int, SequenceResult]:
        batch = step.batch
        tokens = dict(zip([s.slot for s in batch.sequences], self._picks.pop(0), strict=True))
        for scheduled in batch.sequences:
            self._table.finish(scheduled, [tokens[scheduled.slot]])
        return {slot: SequenceResult(slot, [token]) for slot, token in tokens.items()}


class Line:
    """All stages of a model, in one thread: each with a table of its own."""

    def __init__(self, count: int, picks: list[list[int]]) -> None:
        tokens: list[torch.Tensor] = []
        self.tables = [SequenceTable(4, 16, 4) for _ in range(count)]
        self.stages = [FakeStage(index, count, tokens=tokens) for index in range(count)]
        samplers: list[Any] = [Sampler(table, picks) for table in self.tables]
        self.parts = [StageTokens(*each) for each in zip(samplers, self.tables, self.stages, strict=True)]

    def run(self, batch: Batch, index: int) -> None:
        part, table = self.parts[index], self.tables[index]
        part.begin(batch)
        for slot in batch.freed_slots:
            table.num_tokens[slot] = 0
        table.begin(batch)
        part.sample(LaunchedStep(batch, None, {}))  # type: ignore[arg-type]

    def known(self, index: int, slot: int) -> list[int]:
        table = self.tables[index]
        return table.token_ids[slot, : table.num_tokens[slot]].tolist()


def test_the_first_stage_waits_for_tokens_only_when_a_step_needs_them() -> None:
    line = Line(3, [[11], [21], [12], [22]])
    line.run(_step(1, 0, new=(0,)), 0)
    line.run(_step(2, 1, new=(1,)), 0)  # before any other stage has run
    assert line.known(0, 0) == [7, 8]
    for index in (1, 2):
        line.run(_step(1, 0, new=(0,)), index)
        line.run(_step(2, 1, new=(1,)), index)
    line.run(_step(3, 0), 0)
    assert line.known(0, 0) == [7, 8, 11]
    assert line.known(0, 1) == [7, 8]
    line.run(_step(4, 1), 0)
    assert line.known(0, 1) == [7, 8, 21]
    assert line.known(2, 1) == [7, 8, 21]
    assert [int(table.num_tokens[1]) for table in line.tables] == [3, 3, 3]


def test_tokens_of_a_sequence_that_left_its_slot_are_not_the_next_ones() -> None:
    line = Line(2, [[11, 21], [31]])
    both = _step(1, 0, 1, new=(0, 1))
    again = _step(2, 0, new=(0,), freed=(0,))
    for index in (0, 1):
        line.run(both, index)
        line.run(again, index)
    assert line.known(0, 0) == [7, 8]
    line.run(_step(3, 0, 1), 0)
    assert line.known(0, 0) == [7, 8, 31]
    assert line.known(0, 1) == [7, 8, 21]


def test_a_size_of_micro_batches_needs_stages() -> None:
    with pytest.raises(ValueError, match="does nothing without --pipeline-parallel-size"):
        EngineOptions(pp_max_micro_batch_size=4)
    assert EngineOptions(pp_max_micro_batch_size=4, pipeline_parallel_size=2).pp_max_micro_batch_size == 4
