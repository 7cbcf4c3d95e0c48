"""Prompts are cut so that decoding sequences wait at most so many plain steps."""

from __future__ import annotations

import random

import pytest

from fwk_features.step_planning.pace import FEWEST, Line, Pace

PLAIN, START, TOKEN = 0.010, 0.003, 0.0002


def seconds(num_tokens: int, factor: float = 1.0) -> float:
    """Of a step of four sequences and so many tokens of prompts."""
    return PLAIN + factor * (START + num_tokens * TOKEN)


def taught(most: float | None = 2.5) -> Pace:
    """What some seconds of serving tell."""
    pace = Pace(most)
    pace.took(0, 300, START + 300 * TOKEN)
    pace.took(4, 0, PLAIN)
    serve(pace, 1.0)
    return pace


def serve(pace: Pace, factor: float) -> None:
    """Prompts of random lengths, in as many steps as they are cut to."""
    draw = random.Random(0)
    for _ in range(40):
        left = draw.randint(20, 300)
        while left:
            count = min(left, pace.room(4, 512))
            pace.took(4, count, seconds(count, factor))
            pace.took(4, 0, PLAIN)
            left -= count


def test_a_step_with_prompts_takes_so_many_plain_steps() -> None:
    room = taught().room(4, 512)
    assert 2.3 * PLAIN <= seconds(room) <= 2.55 * PLAIN


@pytest.mark.parametrize("pace", [Pace(None), Pace(2.5), taught(None)])
def test_without_a_bound_or_measurements_prompts_take_the_step(pace: Pace) -> None:
    assert pace.room(4, 512) == 512


def test_where_nothing_decodes_prompts_take_the_step() -> None:
    assert taught().room(0, 512) == 512


def test_a_prompt_always_continues() -> None:
    pace = Pace(1.0)
    pace.took(0, 300, 300 * TOKEN)
    pace.took(4, 0, PLAIN)
    assert (pace.room(4, 512), pace.room(4, 5)) == (FEWEST, 5)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_it_follows_what_steps_take(factor: float) -> None:
    """A faster and a slower machine, or other contexts."""
    pace = taught()
    serve(pace, factor)
    assert 2.2 * PLAIN <= seconds(pace.room(4, 512), factor) <= 2.6 * PLAIN


def test_where_a_bound_cannot_be_kept_prompts_are_not_cut_to_pieces() -> None:
    """Each step with prompts costs more than the bound: twice as much again goes to their tokens."""
    pace = Pace(1.1)
    pace.took(0, 300, START + 300 * TOKEN)
    pace.took(4, 0, PLAIN)
    serve(pace, 4.0)
    assert pace.room(4, 512) * TOKEN == pytest.approx(2 * START, rel=0.5)


def test_one_step_that_was_held_up_changes_little() -> None:
    pace = taught()
    before = pace.room(4, 512)
    pace.took(4, 24, 30.0)
    pace.took(4, 0, 30.0)
    assert before / 1.6 < pace.room(4, 512) < before * 1.6


def test_batches_of_other_sizes_have_plain_times_of_their_own() -> None:
    pace = taught()
    pace.took(32, 0, 4 * PLAIN)
    assert pace.room(32, 512) > 3 * pace.room(4, 512)
    assert pace.room(64, 512) == pace.room(32, 512)  # the nearest that was seen


def test_while_a_batch_fills_a_plain_step_is_one_of_all_of_it() -> None:
    pace = taught()
    pace.took(32, 0, 4 * PLAIN)
    assert pace.room(31, 512, 32) == pace.room(32, 512)
    assert pace.room(4, 512, 5) == pace.room(4, 512)


def test_each_prompt_that_waits_has_the_room_of_one() -> None:
    """Else those that decode would end faster than others begin, and the batch would shrink."""
    pace = taught()
    assert pace.room(4, 512, 6) == pytest.approx(2 * pace.room(4, 512), abs=4)
    assert pace.room(4, 512, 7) == pytest.approx(3 * pace.room(4, 512), abs=8)


def test_a_slow_beginning_does_not_let_whole_prompts_in() -> None:
    """The first steps touch memory for the first time: ten times as long, and hardly longer for a longer prompt."""
    pace = Pace(2.5)
    pace.took(0, 32, 0.16)
    pace.took(4, 0, PLAIN)
    for _ in range(3):
        pace.took(4, pace.room(4, 512), 0.15)
    serve(pace, 1.0)
    assert 2.3 * PLAIN <= seconds(pace.room(4, 512)) <= 2.6 * PLAIN
    longest = 0
    for count in (32, 240, 210, 230, 190):  # as where a prompt comes before anything was measured
        pace = Pace(2.5)
        pace.took(0, count, 0.16)
        pace.took(4, 0, PLAIN)
        pace.took(4, 240, 0.15)
        longest = max(longest, pace.room(4, 512))
    assert seconds(longest) <= 2.6 * PLAIN


@pytest.mark.parametrize("count", [20, 200])
def test_a_first_step_with_prompts_that_took_no_longer_tells_nothing(count: int) -> None:
    pace = Pace(2.5)
    pace.took(4, 0, PLAIN)
    for _ in range(5):
        pace.took(4, count, PLAIN)
    serve(pace, 1.0)
    assert 2.3 * PLAIN <= seconds(pace.room(4, 512)) <= 2.6 * PLAIN


def test_points_of_one_length_tell_nothing_of_another() -> None:
    line = Line()
    line.add(200, 0.1)
    for _ in range(100):
        line.add(16, 0.02)
    assert line.start + line.slope * 16 == pytest.approx(0.02, rel=0.05)
    assert line.slope == pytest.approx(0.08 / 184, rel=0.2)
