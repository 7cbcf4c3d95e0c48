"""Inputs of a step: those that are the last step's, a place further, are what they would be if built anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fwk.features.worker import WorkerFeatures
from fwk.interfaces.device import Device, DeviceContext
from fwk.interfaces.feature import WorkerPart, WorkerPartContext
from fwk.interfaces.step import StepRows
from fwk.types import Batch, ForwardBatch, NewSequence, SamplingParams, ScheduledSequence
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.runner.staging import StagingRing

BLOCK, NUM_SLOTS, LONGEST = 4, 6, 60


class Host(Device):
    """The host, as far as inputs go."""

    kind = "cpu"
    collective = "gloo"
    is_host = True

    def missing(self) -> str | None: ...
    def host(self) -> Any: ...
    def count(self) -> int | None: ...
    def take(self, index: int) -> Any: ...
    def memory(self, device: torch.device, num_sharers: int) -> Any: ...
    def defaults(self, stored_dtype: str, max_running_requests: int) -> Any: ...


def ring() -> StagingRing:
    return StagingRing(Host(DeviceContext()), torch.device("cpu"), 3)


def tables() -> tuple[SequenceTable, InputBuffers]:
    table = SequenceTable(NUM_SLOTS, LONGEST, BLOCK)
    return table, InputBuffers(table, 64, NUM_SLOTS, ring())


def numbers(forward: ForwardBatch, rows: StepRows) -> dict[str, object]:
    """All that a step is told, as lists."""
    found: dict[str, object] = {}
    for holder in (forward, forward.kv_groups[0], rows):
        for field in dataclasses.fields(holder):
            value = getattr(holder, field.name)
            if isinstance(value, torch.Tensor | np.ndarray):
                found[f"{type(holder).__name__}.{field.name}"] = (tuple(value.shape), value.tolist())
    return found


class Plans:
    """Makes batches of sequences that decode, with the blocks they need."""

    def __init__(self, lengths: list[int]) -> None:
        self._blocks = iter(range(1, 1000))
        self.lengths = dict(enumerate(lengths))
        self._step = 0

    def prompts(self) -> Batch:
        new = [
            NewSequence(slot, [7 * slot + i for i in range(n)], n, 0, [], SamplingParams(temperature=slot / 2), slot)
            for slot, n in self.lengths.items()
        ]
        chunks = [ScheduledSequence(slot, n, True, self._grow(0, n), []) for slot, n in self.lengths.items()]
        return Batch(self._count(), [], new, chunks)

    def decode(self, slots: list[int], replaced: dict[int, list[tuple[int, int]]] | None = None) -> Batch:
        chunks: list[ScheduledSequence] = []
        for slot in slots:
            n = self.lengths[slot]
            self.lengths[slot] = n + 1
            chunks.append(ScheduledSequence(slot, 1, True, self._grow(n, n + 1), [], (replaced or {}).get(slot, [])))
        return Batch(self._count(), [], [], chunks)

    def _grow(self, before: int, after: int) -> list[int]:
        return [next(self._blocks) for _ in range(-(-before // BLOCK), -(-after // BLOCK))]

    def _count(self) -> int:
        self._step += 1
        return self._step


def steps() -> Iterator[Batch]:
    """Sequences that decode together; one rests; a shared block is replaced; the longest needs a wider table."""
    plans = Plans([3, 9, 5])
    yield plans.prompts()
    for _ in range(9):
        yield plans.decode([0, 1, 2])
    yield plans.decode([0, 1, 2], {1: [(0, 900), (1, 901)]})
    for _ in range(6):
        yield plans.decode([2, 0])
    for _ in range(7):
        yield plans.decode([0, 1, 2])


def take_in(table: SequenceTable, batch: Batch) -> None:
    for scheduled in batch.sequences:
        table.finish(scheduled, [1000 * scheduled.slot + batch.step])


def test_a_place_further_is_as_built_anew() -> None:
    """Every step's inputs, by buffers that saw the step before, and by buffers that did not."""
    table, inputs = tables()
    num_again, last = 0, None
    for batch in steps():
        table.begin(batch)
        forward, rows = inputs.prepare(batch)
        num_again += forward is last
        last = forward
        anew = InputBuffers(table, 64, NUM_SLOTS, ring()).prepare(batch)
        assert numbers(forward, rows) == numbers(*anew)
        take_in(table, batch)
    assert num_again >= 14


@pytest.mark.parametrize("change", ["new", "a chunk", "drafts", "no sample", "another order"])
def test_other_steps_are_built_anew(change: str) -> None:
    plans = Plans([3, 9])
    table, inputs = tables()
    first: ForwardBatch | None = None
    for batch in (plans.prompts(), plans.decode([0, 1])):
        table.begin(batch)
        first, _ = inputs.prepare(batch)
        take_in(table, batch)
    batch = plans.decode([1, 0] if change == "another order" else [0, 1])
    if change == "new":
        tokens = list(range(batch.sequences[0].num_new_tokens))
        batch.new = [NewSequence(0, tokens, 1, 0, [50], SamplingParams(), 3)]
    if change == "a chunk":
        batch.sequences[0] = ScheduledSequence(0, 2, True, [70], [])
    if change == "drafts":
        batch.sequences[0] = ScheduledSequence(0, 2, True, [70], [5])
    if change == "no sample":
        batch.sequences[0] = ScheduledSequence(0, 1, False, [], [])
    table.begin(batch)
    forward, rows = inputs.prepare(batch)
    assert forward is not first
    assert numbers(forward, rows) == numbers(*InputBuffers(table, 64, NUM_SLOTS, ring()).prepare(batch))


def test_other_inputs_in_between_are_noticed() -> None:
    """A draft model's step in the same buffers."""
    plans = Plans([3, 9])
    table, inputs = tables()
    for batch in (plans.prompts(), plans.decode([0, 1])):
        table.begin(batch)
        inputs.prepare(batch)
        take_in(table, batch)
    inputs.fill(np.array([1]), np.array([42]), np.array([2]), np.arange(2), np.array([3]), np.zeros(1, np.int64))
    batch = plans.decode([0, 1])
    table.begin(batch)
    anew = InputBuffers(table, 64, NUM_SLOTS, ring()).prepare(batch)
    assert numbers(*inputs.prepare(batch)) == numbers(*anew)


def test_what_a_token_is_chosen_by_is_asked_once() -> None:
    table, inputs = tables()
    plans = Plans([3, 9])
    table.begin(batch := plans.prompts())
    _, rows = inputs.prepare(batch)
    choices = rows.sampling_state(table)
    assert (choices.is_greedy.tolist(), choices.all_greedy, choices.wants_logprobs) == ([True, False], False, False)
    assert rows.sampling_state(table) is choices
    assert rows.take(np.array([0]), torch.tensor([0])).sampling_state(table).all_greedy


WANTED: dict[str, tuple[dict[str, object], bool, list[int] | None, list[int]]] = {
    "the last token": ({}, True, [4], [0]),
    "nothing": ({}, False, [0], []),
    "a feature's part": ({"features": 1}, True, [0, 1, 2, 3, 4], [4]),
}
"""What a sequence asks for, whether a token is chosen, whose hidden states are wanted, and which of these."""


class Reader(WorkerPart):
    """Reads the hidden states of all tokens of a step."""

    def wants_hidden(self, slots: np.ndarray) -> bool:
        return True


PART = WorkerPartContext("reader", torch.device("cpu"), torch.from_numpy, lambda values: values)


@pytest.mark.parametrize("case", WANTED)
def test_hidden_states_are_asked_for_where_somebody_needs_them(case: str) -> None:
    asked, samples, hidden_indices, logits_indices = WANTED[case]
    table = SequenceTable(NUM_SLOTS, LONGEST, BLOCK)
    table.parts = WorkerFeatures([("features.reader", Reader(PART))])
    table.begin(Batch(1, [], [NewSequence(0, [5] * 9, 9, 0, [7, 8, 9], SamplingParams(), 0)], []))
    for name, value in asked.items():
        getattr(table, name)[0] = value
    batch = Batch(2, [], [], [ScheduledSequence(0, 5, samples, [], [])])
    for prunes_last_layer in (True, False):
        inputs = InputBuffers(table, 64, NUM_SLOTS, ring(), prunes_last_layer=prunes_last_layer)
        forward, _ = inputs.prepare(batch)
        found = None if forward.hidden_indices is None else forward.hidden_indices.tolist()
        wanted = (hidden_indices, logits_indices) if prunes_last_layer else (None, [4] * samples)
        assert (found, forward.logits_indices.tolist()) == wanted
