"""The short way of taking in a result says what the long one says."""

from __future__ import annotations

import random

import msgspec
import pytest

from fwk.engine.sequence import Sequence
from fwk.engine.sequence_update import append, plain_event
from fwk.types import Request, SamplingParams, ScheduledSequence, SequenceResult

EOS = frozenset({0})


def running(num_output: int, sampling: SamplingParams) -> Sequence:
    sequence = Sequence(Request(request_id="a", prompt_token_ids=[5, 6, 7], sampling=sampling), 0, 0, 0.0)
    sequence.token_ids += [9] * num_output
    sequence.num_computed_tokens = len(sequence.token_ids)
    sequence.num_drafts, sequence.num_accepted_drafts = 4, 1
    return sequence


@pytest.mark.parametrize("seed", range(40))
def test_the_short_way_is_the_long_one(seed: int) -> None:
    draw = random.Random(seed)
    sampling = SamplingParams(
        max_tokens=8, stop_token_ids=[1], ignore_eos=draw.random() < 0.5, min_tokens=draw.choice((0, 4))
    )
    num_output, drafts = draw.randrange(8), [2] * draw.choice((0, 0, 2, 3))
    tokens = [draw.choice((0, 1, 3, 4, 5, 6)) for _ in range(draw.randint(1, 1 + len(drafts)))]
    scheduled = ScheduledSequence(0, 1 + len(drafts), True, [], drafts)
    short, long = (running(num_output, sampling) for _ in range(2))
    for sequence in (short, long):
        sequence.num_computed_tokens += len(drafts)
    result = SequenceResult(0, list(tokens), draft_token_ids=[8, 9])
    update = append(long, scheduled, result, EOS)
    event = plain_event(short, scheduled, SequenceResult(0, list(tokens), draft_token_ids=[8, 9]), EOS)
    if event is None:  # the first token, and whatever may end it
        assert num_output == 0 or num_output + len(tokens) >= 8 or not {0, 1}.isdisjoint(tokens)
        assert short.token_ids == [5, 6, 7, *[9] * num_output]
        return
    assert event == update.event(long)
    for name in ("token_ids", "num_computed_tokens", "num_drafts", "num_accepted_drafts", "drafts"):
        assert getattr(short, name) == getattr(long, name), name


@pytest.mark.parametrize(
    "result",
    [
        SequenceResult(0, [3], error="no"),
        SequenceResult(0, [3], is_complete=True),
        SequenceResult(0, []),
        SequenceResult(0, [3], features={"probe": msgspec.Raw(b"\xc0")}),
    ],
)
def test_what_says_more_takes_the_long_way(result: SequenceResult) -> None:
    sequence = running(2, SamplingParams(max_tokens=8))
    assert plain_event(sequence, ScheduledSequence(0, 1, True, [], []), result, EOS) is None


def test_a_step_that_is_taken_back_takes_the_long_way() -> None:
    sequence = running(2, SamplingParams(max_tokens=8))
    scheduled = ScheduledSequence(0, 2, True, [], [4])
    assert plain_event(sequence, scheduled, SequenceResult(0, [3]), EOS, has_states=True) is None
    assert plain_event(sequence, scheduled, SequenceResult(0, [3]), EOS) is not None
