"""Which processors run, when the sampler does the work of some of them itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fwk.errors import BlameSequence
from fwk.interfaces.sampling import LogitsProcessor, LogitsView, Sampler, SamplingContext, SamplingRows
from fwk.interfaces.step import StepRows
from fwk.types import NewSequence, SamplingParams
from fwk.types.sampling import RANGES
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.pipeline import Place, SamplingPipeline, num_finished
from fwk_speculative.drafting.acceptance import EXACT
from fwk_speculative.drafting.drawn import Drawn

NUMBERS = (1.0, 10.0, 100.0)
CONTEXT = SamplingContext(4, 3, torch.device("cpu"), ())


class Add(LogitsProcessor):
    """Adds its number to every logit of the sequences with a temperature."""

    number = 0.0

    def add(self, slot: int, params: SamplingParams) -> bool:
        return params.temperature > 0

    def remove(self, slot: int) -> None:
        pass

    def apply(self, logits: torch.Tensor, view: LogitsView) -> torch.Tensor:
        return logits + self.number


class Recorder(Sampler):
    """Keeps what it was given."""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        self.logits, self.rows = logits, rows
        return logits.argmax(-1)


def adding(number: float) -> LogitsProcessor:
    processor = Add(CONTEXT)
    processor.number = number
    return processor


def pipeline(count: int, temperatures: list[float]) -> tuple[SamplingPipeline, Recorder]:
    """Processors that add 1, 10 and 100, the last ``count`` of them left to the sampler; one sequence for each slot."""
    table, recorder = SequenceTable(3, 32, 4), Recorder(CONTEXT)
    processors = {Place(int(number), f"add {number:g}"): adding(number) for number in NUMBERS}
    finishes = tuple(f"add {number:g}" for number in NUMBERS[len(NUMBERS) - count :])
    made = SamplingPipeline(processors, recorder, table, finishes)
    for slot, temperature in enumerate(temperatures):
        new = NewSequence(slot, [1, 2], 2, 0, [], SamplingParams(temperature=temperature), 7)
        table.add(new)
        made.add(new)
    return made, recorder


def rows_of(slots: list[int]) -> StepRows:
    return StepRows(np.arange(len(slots)), np.array(slots), np.full(len(slots), 2))


def test_the_last_processors_are_left_to_the_sampler_only_when_nobody_comes_after_them() -> None:
    own = ("temperature", "truncation")
    assert num_finished(["bias", "temperature", "truncation"], own) == 2
    assert num_finished(["temperature", "truncation"], own) == 2
    assert num_finished(["temperature", "truncation", "mine"], own) == 0
    assert num_finished(["temperature", "mine", "truncation"], own) == 0
    assert num_finished(["truncation"], own) == 0
    assert num_finished(["temperature"], ()) == 0


def test_processors_left_to_the_sampler_do_not_run() -> None:
    made, recorder = pipeline(2, [1.0, 0.0, 1.0])
    made.choose(torch.zeros(3, 4), rows_of([2, 1, 0]))
    assert recorder.rows.unfinished is not None
    assert recorder.rows.unfinished.tolist() == [2, -1, 0]
    assert recorder.logits[0].tolist() == [1.0] * 4
    made, recorder = pipeline(0, [1.0, 0.0, 1.0])
    made.choose(torch.zeros(3, 4), rows_of([2, 1, 0]))
    assert recorder.rows.unfinished is None
    assert recorder.logits[0].tolist() == [111.0] * 4


def test_greedy_rows_alone_leave_the_sampler_nothing_to_finish() -> None:
    made, recorder = pipeline(2, [0.0, 0.0, 1.0])
    logits = torch.zeros(2, 4, dtype=torch.bfloat16)
    made.choose(logits, rows_of([0, 1]))
    assert recorder.rows.unfinished is None
    assert recorder.logits is logits  # nobody asked for a copy


def test_rows_that_are_left_keep_what_was_rejected() -> None:
    made, recorder = pipeline(0, [1.0, 1.0, 1.0])
    rows = rows_of([0, 1, 2])
    rows.num_fewer, rows.most_fewer = torch.tensor([1, 0, 2]), 3
    made.pick(torch.zeros(3, 4), rows, {1: BlameSequence(1, "refused")})
    assert recorder.rows.num_fewer is not None
    assert recorder.rows.num_fewer.tolist() == [1, 2]
    assert recorder.rows.most_fewer == 3


@pytest.mark.parametrize(
    ("what", "temperature", "is_late"),
    [
        ({}, 1.0, True),
        ({"late_positions": False}, 1.0, False),
        ({"late_positions": False}, 0.0, True),
        ({"reads_places": True}, 1.0, False),
        ({"reads_places": True}, 0.0, True),  # it asks nothing
        ({"reads_history": True}, 1.0, False),
        ({"ends": lambda *_: None}, 1.0, False),
    ],
)
def test_a_token_is_chosen_late_only_where_nobody_needs_its_place(
    what: dict[str, Any], temperature: float, is_late: bool
) -> None:
    said = {"late_positions": True, "reads_places": False, "reads_history": False, **what}
    late = said.pop("late_positions")
    table = SequenceTable(3, 32, 4)
    processors = {Place(1, "mine"): type("Mine", (Add,), said)(CONTEXT)}
    made = SamplingPipeline(processors, Recorder(CONTEXT), table, late_positions=late)
    new = NewSequence(1, [1, 2], 2, 0, [], SamplingParams(temperature=temperature), 7)
    table.add(new)
    made.add(new)
    assert made.may_be_late(1) is is_late


def _raises(error: Exception) -> dict[int, int | Exception]:
    raise error


@pytest.mark.parametrize(
    "told",
    [
        lambda *_: _raises(OSError("broken")),
        lambda *_: _raises(BlameSequence(0, "of one, with the state of the others unknown")),
        lambda *_: {1: 0},  # a slot it was not asked about
        lambda *_: None,
    ],
)
def test_a_processor_that_fails_for_all_fails_only_the_sequences_that_use_it(told: Any) -> None:
    table = SequenceTable(3, 32, 4)
    processor = type("Mine", (Add,), {"ends": lambda *_: None, "ends_each": told})(CONTEXT)
    made = SamplingPipeline({Place(1, "mine"): processor}, Recorder(CONTEXT), table)
    for slot, temperature in enumerate([1.0, 0.0, 1.0]):
        new = NewSequence(slot, [1, 2], 2, 0, [], SamplingParams(temperature=temperature), 7)
        table.add(new)
        made.add(new)
    blamed = made.ends_each([0, 1, 2], [3, 3, 3])
    assert {slot: error.slot for slot, error in blamed.items() if isinstance(error, BlameSequence)} == {0: 0, 2: 2}


def test_where_core_needs_the_processed_logits_all_processors_run() -> None:
    """A draft that its decoder drew is settled by the target's distribution as its processors leave it."""
    made, recorder = pipeline(2, [1.0, 1.0, 1.0])
    rows = rows_of([0, 1])
    drafts = {(1, 2): (3, torch.tensor([0.0, 0.0, 0.0, 1.0]))}
    rows.drawn = Drawn(drafts, made._table, torch.from_numpy, EXACT)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(2, 1)
    ran: list[list[int]] = []
    for active in made._last:
        apply = active.processor.apply

        def noted(x: torch.Tensor, view: LogitsView, apply=apply) -> torch.Tensor:  # type: ignore[no-untyped-def]
            ran.append(view.slots.tolist())
            return apply(x, view)

        active.processor.apply = noted  # type: ignore[method-assign]
    made.choose(logits, rows)
    assert ran == [[1], [1]]
    assert recorder.rows.unfinished is not None
    assert recorder.rows.unfinished.tolist() == [0, -1]
    assert recorder.logits[0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_while_one_of_them_is_exchanged_core_does_their_work() -> None:
    """Else it would be done twice for who started before."""
    made, recorder = pipeline(2, [1.0, 1.0, 1.0])
    made.switch(Place(10, "add 10"), adding(10.0))
    made.choose(torch.zeros(3, 4), rows_of([0, 1, 2]))
    assert recorder.logits.tolist() == [[111.0] * 4] * 3
    assert recorder.rows.unfinished is None
    for slot in range(3):
        made.remove(slot)
    made.add(NewSequence(0, [1, 2], 2, 0, [], SamplingParams(temperature=1.0), 7))
    made.choose(torch.zeros(1, 4), rows_of([0]))
    assert recorder.logits.tolist() == [[1.0] * 4]


def test_a_name_that_is_no_field_is_told_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"SamplingParams has no field 'max_token': did you mean max_tokens\?"):
        SamplingParams(max_token=5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"there are max_tokens, .*extra"):
        SamplingParams(zzz=5)  # pyright: ignore[reportCallIssue]


def test_values_that_no_request_can_have_are_refused_where_they_are_given() -> None:
    """Of each field: another type, and what is out of its range; with the field's name, as a ``ValueError``."""
    for field in SamplingParams.__struct_fields__:
        with pytest.raises(ValueError, match=rf"^{field}: expected `\S+"):
            SamplingParams(**{field: object()})
    for field, (low, high) in RANGES.items():
        for value in (low - 1, high + 1, *([math.nan] if isinstance(low, float) else [])):
            if (field, value) != ("max_tokens", 0):  # of NOTHING_FOLLOWS
                with pytest.raises(ValueError, match=rf"^{field}( must be between|: integer value out of range)"):
                    SamplingParams(**{field: value})
    wrong: dict[str, Any] = {
        "top_p": 0, "max_tokens": True, "top_k": 1.5, "stop": "x", "stop_token_ids": [1.5], "logit_bias": {"a": 1},
        "bad_words": [""], "allowed_token_ids": [], "temperature": "0.5", "seed": 2**63, "prompt_logprobs": True,
        "stop_regex": ["a("],
    }  # fmt: skip
    for field, value in wrong.items():
        with pytest.raises(ValueError, match=rf"^{field}|^a {field[:-1].replace('_', ' ')}"):
            SamplingParams(**{field: value})
    with pytest.raises(ValueError, match=r"min_tokens \(9\) is larger than max_tokens \(5\)"):
        SamplingParams(min_tokens=9, max_tokens=5)
    assert SamplingParams(temperature=torch.tensor(0.5).numpy()[()], top_k=torch.tensor(3)).top_k == 3  # pyright: ignore[reportArgumentType]
