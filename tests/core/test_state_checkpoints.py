"""States of recurrent layers kept for the prefix cache: where sequences continue, and what is given up."""

from __future__ import annotations

import pytest
from tests.helpers.engine_machine import assert_idle, prompts, request, run

from fwk.engine.core import Engine
from fwk.engine.state_checkpoints import StateCheckpoints
from fwk_kit.testing.fake_engine import make_engine, reference

PROMPT = [7 * i % 90 for i in range(41)]


def engine(num_places: int, **settings: object) -> Engine:
    return make_engine(num_state_places=num_places, **settings)  # type: ignore[arg-type]


def serve(engine: Engine, name: str, prompt: list[int], max_tokens: int = 4) -> int:
    """Serve one request, whose output must be right; the tokens of its prompt that were found in the cache."""
    before = engine.stats().cached_prompt_tokens
    assert engine.add(request(name, prompt, max_tokens)) == []
    assert run(engine) == {(name, 0): reference(prompt, max_tokens)}
    return engine.stats().cached_prompt_tokens - before


def test_a_prompt_continues_where_the_last_one_of_its_prefix_was_kept() -> None:
    e = engine(4)
    assert serve(e, "a", PROMPT) == 0
    assert serve(e, "b", PROMPT) == 40  # blocks of four: all but the last token
    assert serve(e, "c", [*PROMPT[:38], 1, 2, 3]) == 32  # a chunk ended there
    assert serve(e, "d", [*PROMPT[:31], 1, 2, 3]) == 0  # K/V would be there, but no state
    assert_idle(e)


def test_the_next_turn_continues_from_the_answer() -> None:
    e = engine(8, state_interval=8)
    assert serve(e, "a", PROMPT, 30) == 0
    turn = [*PROMPT, *reference(PROMPT, 30), 1, 2, 3]
    assert serve(e, "b", turn) == 64  # the last multiple of eight before token 71


def test_sequences_of_one_step_do_not_share_what_is_not_computed_yet() -> None:
    e = engine(8, step_tokens=128, chunk_tokens=None)
    for name in "abc":
        assert e.add(request(name, PROMPT, 4)) == []
    assert run(e) == {(name, 0): reference(PROMPT, 4) for name in "abc"}
    assert_idle(e)


@pytest.mark.parametrize("num_places", [0, 1, 2])
def test_few_places_cost_time_and_nothing_else(num_places: int) -> None:
    e = engine(num_places, num_blocks=24, max_running=4, depth=2)
    texts = prompts(12, shared=20)
    for i, prompt in enumerate(texts):
        assert e.add(request(str(i), prompt, 6)) == []
    assert run(e) == {(str(i), 0): reference(prompt, 6) for i, prompt in enumerate(texts)}
    assert_idle(e)
    assert num_places or not e.stats().cached_prompt_tokens


def test_the_least_recently_used_is_given_up() -> None:
    states = StateCheckpoints(2, 4, 8)
    for block, tokens in ((10, 4), (11, 8)):
        place = states.take(tokens, 100)
        assert place is not None
        states.keep(block, place)
    assert states.take(12, 100) is None  # both are of the step being planned
    states.commit()
    assert states.num_usable([9, 10, 11, 12]) == 3
    kept = states.use(10)
    taken = states.take(12, 100)
    assert taken is not None
    assert (states.num_usable([10]), states.num_usable([11])) == (1, 0)
    assert taken != kept
    states.check(2, num_saving=1)
    states.give_back(taken)
    states.forget(10)
    states.commit()
    assert states.num_kept == 0
    states.check(2, num_saving=0)


def test_states_are_kept_at_ends_of_blocks_and_while_generating_now_and_then() -> None:
    states = StateCheckpoints(9, 4, 10)
    found = [tokens for tokens in range(1, 60) if states.take(tokens, 20) is not None]
    assert found == [4, 8, 12, 16, 24, 36, 48]  # an interval of ten is one of three blocks
    assert states.cut(0, 30, 21) == 20
    assert states.cut(20, 1, 21) == 1
    assert states.cut(8, 4, 21) == 4
    assert StateCheckpoints(0, 4, 10).cut(0, 30, 21) == 30
