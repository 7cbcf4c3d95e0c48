"""The scheduler, allocator and caches together: nothing lost, nothing mixed up, everything given back."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from tests.helpers.engine_machine import (
    POLICIES,
    Contrary,
    EngineMachine,
    assert_idle,
    prompts,
    request,
    run,
    scoring,
)
from tests.helpers.selection import seeds

from fwk.errors import InvalidRequest
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy
from fwk_kit.testing.fake_engine import VOCAB, FakeExecutor, make_engine, next_token, reference


@pytest.mark.gate(20)
@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("step", "chunk"), [(16, 5), (64, None), (1, 1)])
def test_outputs_do_not_depend_on_the_way(cache: str, policy: str, depth: int, step: int, chunk: int | None) -> None:
    engine = make_engine(cache=cache, policy=policy, depth=depth, step_tokens=step, chunk_tokens=chunk, num_blocks=40)
    for i, prompt in enumerate(prompts(12, shared=11)):
        assert engine.add(request(f"r{i}", prompt, max_tokens=9, priority=i * 7 % 30)) == []
    outputs = run(engine)
    for i, prompt in enumerate(prompts(12, shared=11)):
        assert outputs[f"r{i}", 0] == reference(prompt, 9)
    assert_idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_recomputes_the_same_tokens(depth: int) -> None:
    engine = make_engine(num_blocks=16, cache="none", depth=depth)
    wanted = {}
    for i, prompt in enumerate(prompts(8, seed=3, longest=10)):
        engine.add(request(f"r{i}", prompt, max_tokens=40))
        wanted[f"r{i}", 0] = reference(prompt, 40)
    assert run(engine) == wanted
    assert engine.stats().preemptions > 0
    assert_idle(engine)


def test_a_prefix_is_shared_within_one_step() -> None:
    engine = make_engine(num_blocks=64, step_tokens=128, chunk_tokens=128)
    prefix = list(range(40))
    for i in range(4):
        engine.add(request(f"r{i}", [*prefix, i], max_tokens=2))
    engine.step()
    assert isinstance(engine.executor, FakeExecutor)
    first = engine.executor.worker.batches[0]
    assert [s.num_new_tokens for s in first.sequences] == [41, 1, 1, 1]
    assert engine.stats().cached_prompt_tokens == 3 * 40
    assert run(engine)["r3", 0][-1] == reference([*prefix, 3], 2)[-1]


def test_n_sequences_share_their_prompt() -> None:
    engine = make_engine()
    engine.add(request("r", list(range(21)), max_tokens=5, n=4))
    outputs = run(engine)
    assert outputs == {("r", i): reference(list(range(21)), 5) for i in range(4)}
    assert engine.stats().cached_prompt_tokens == 3 * 20
    assert_idle(engine)


def test_stop_tokens_and_eos_end_a_sequence() -> None:
    prompt = [5, 6, 7]
    output = reference(prompt, 20)
    engine = make_engine(eos=frozenset({output[6]}))
    engine.add(request("eos", prompt, max_tokens=20))
    engine.add(request("ignored", prompt, max_tokens=20, ignore_eos=True))
    engine.add(request("named", prompt, max_tokens=20, stop_token_ids=[output[3]]))
    engine.add(request("late", prompt, max_tokens=20, stop_token_ids=[output[3]], min_tokens=5))
    outputs = run(engine)
    first = output.index(output[3]) + 1
    assert outputs["eos", 0] == output[: output.index(output[6]) + 1]
    assert outputs["ignored", 0] == output
    assert outputs["named", 0] == output[:first]
    assert len(outputs["late", 0]) > 4


@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("cache", "depth"), [("radix", 1), ("none", 1), ("radix", 2)])
def test_drafts_change_nothing_but_the_number_of_steps(quality: float, cache: str, depth: int) -> None:
    rng = random.Random(1)

    def draft(tokens: list[int]) -> list[int]:
        guess = list(tokens)
        for _ in range(rng.randint(0, 5)):
            guess.append(next_token(guess) if rng.random() < quality else rng.randrange(VOCAB))
        return guess[len(tokens) :]

    engine = make_engine(draft=draft, num_blocks=30, step_tokens=24, chunk_tokens=10, cache=cache, depth=depth)
    for i, prompt in enumerate(prompts(6, seed=5, longest=30)):
        engine.add(request(f"r{i}", prompt, max_tokens=25))
    outputs = run(engine)
    for i, prompt in enumerate(prompts(6, seed=5, longest=30)):
        assert outputs[f"r{i}", 0] == reference(prompt, 25)
    assert engine.stats().accepted_draft_tokens > 0 or not quality
    assert_idle(engine)


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    engine = make_engine(num_blocks=4, block_size=4, max_len=100)
    with pytest.raises(InvalidRequest, match="room for 16"):
        engine.scheduler.add(request("big", list(range(10)), max_tokens=7))
    [event] = engine.add(request("big", list(range(10)), max_tokens=7))
    assert event.finish_reason == "error"
    assert event.error is not None
    engine.add(request("fits", list(range(10)), max_tokens=6))
    assert run(engine)["fits", 0] == reference(list(range(10)), 6)
    assert_idle(engine)


@pytest.mark.gate(15)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_compute_what_is_cached_end_in_a_small_pool(policy: str, cache: str, depth: int) -> None:
    """Prompts that begin alike, and may not use the cache: together the cache's blocks and theirs are too many."""
    engine = scoring(
        make_engine(
            num_blocks=27, block_size=4, cache=cache, policy=policy, depth=depth, step_tokens=2048, chunk_tokens=16
        )
    )
    lengths = (3, 17, 40, 1, 90, 16, 33, 64)
    for i, length in enumerate(lengths):
        engine.add(request(f"r{i}", list(range(length)), max_tokens=12, prompt_logprobs=0))
    outputs = run(engine, 500)
    assert outputs == {(f"r{i}", 0): reference(list(range(n)), 12) for i, n in enumerate(lengths)}
    assert_idle(engine)


def test_prompts_computed_at_the_same_time_hold_their_prefix_once() -> None:
    """The second computes what the first is computing, and then uses the first one's blocks."""
    engine = scoring(make_engine(num_blocks=64, block_size=4, step_tokens=64, chunk_tokens=16))
    for name in "ab":
        engine.add(request(name, list(range(64)), max_tokens=4, prompt_logprobs=0))
    held: list[int] = []
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        held.append(stats.num_held_blocks if stats.num_running == 2 else 0)
    assert max(held) <= 16 + 2 + 4  # the prefix, a block each to decode in, and a chunk before it is found cached
    assert_idle(engine)


def test_who_waits_for_blocks_keeps_its_own() -> None:
    """The first continues; the second waits with what it has computed instead of starting over."""
    engine = make_engine(num_blocks=16, block_size=4, cache="none", step_tokens=64, chunk_tokens=8)
    for name, length in (("first", 20), ("second", 20)):
        engine.add(request(name, list(range(length)), max_tokens=20))
    outputs = run(engine)
    assert outputs["second", 0] == reference(list(range(20)), 20)
    assert engine.stats().preemptions == 1


def test_nobody_starts_while_another_waits_for_blocks() -> None:
    """Else small requests, one after the other, could keep the blocks that a large one waits for."""
    engine = make_engine(
        num_blocks=11, block_size=4, cache="none", step_tokens=64, chunk_tokens=8, conservativeness=0.0
    )
    engine.add(request("first", list(range(21)), max_tokens=4))
    engine.add(request("large", list(range(24)), max_tokens=4))
    for _ in range(3):
        engine.step()
    assert engine.stats().num_free_blocks == 1  # of two that the large one's next chunk needs
    engine.add(request("small", [1, 2], max_tokens=1))
    ended = [event.request_id for _ in range(30) for event in engine.step() if event.finish_reason]
    assert ended == ["first", "small", "large"]  # with what the first gives back, there is room for both


def test_fcfs_starves_nobody() -> None:
    """A large request is not overtaken for ever by a stream of small ones."""
    engine = make_engine(num_blocks=20, block_size=4, cache="none", step_tokens=128, chunk_tokens=128)
    for i in range(5):
        engine.add(request(f"small{i}", [i] * 8, max_tokens=20))
    engine.add(request("large", [1] * 60, max_tokens=10))
    ended: list[str] = []
    for i in range(5, 300):
        engine.add(request(f"small{i}", [i % VOCAB] * 8, max_tokens=20))
        ended += [event.request_id for event in engine.step() if event.finish_reason]
        if "large" in ended:
            break
    assert "large" in ended
    assert {name for name in ended if name != "large"} <= {f"small{i}" for i in range(5)}


def test_scheduling_does_not_look_through_a_long_queue() -> None:
    """The policy's order is read only as far as there is room."""
    seen = 0

    class Counting(SchedulePolicy):
        def order(self, waiting, view):  # type: ignore[no-untyped-def]
            nonlocal seen
            for sequence in waiting:
                seen += 1
                yield sequence

    engine = make_engine(max_running=2, policy_object=Counting(ScheduleContext()))
    for i in range(5_000):
        engine.add(request(f"r{i}", [1, 2, 3], max_tokens=50))
    for _ in range(20):
        engine.step()
    assert seen < 100


@pytest.mark.parametrize("seed", seeds(5))
def test_no_policy_can_break_the_books(seed: int) -> None:
    engine = make_engine(num_blocks=24, policy_object=Contrary(seed), step_tokens=20)
    for i, prompt in enumerate(prompts(10, seed=seed, shared=6, longest=20)):
        engine.add(request(f"r{i}", prompt, max_tokens=15))
    outputs = run(engine)
    for i, prompt in enumerate(prompts(10, seed=seed, shared=6, longest=20)):
        assert outputs[f"r{i}", 0] == reference(prompt, 15)
    assert_idle(engine)


EngineMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase
