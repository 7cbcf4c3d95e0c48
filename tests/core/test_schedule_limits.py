"""The arguments that bound and pace scheduling: each does what it says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.scheduling import ask, batches, finish, step

from fwk.engine.core import Engine
from fwk.errors import ConfigError, InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.setup import resolve
from fwk.setup.checkpoint import open_model
from fwk.text import check_embed_input, prepare_input
from fwk.types import SamplingParams, Service
from fwk_features.step_planning.pace import Pace
from fwk_kit.testing.fake_engine import make_engine


def new_tokens(engine: Engine) -> list[list[int]]:
    """Tokens computed for each sequence, step by step."""
    return [[s.num_new_tokens for s in batch.sequences] for batch in batches(engine)]


def test_max_running_requests_bounds_what_is_computed_at_once() -> None:
    engine = make_engine(max_running=3)
    for i in range(10):
        ask(engine, f"r{i}")
    finish(engine)
    assert max(map(len, new_tokens(engine))) == 3


def test_max_prefill_tokens_bounds_a_step() -> None:
    engine = make_engine(step_tokens=10, chunk_tokens=10)
    for i in range(6):
        ask(engine, f"r{i}", 17)
    finish(engine)
    assert max(map(sum, new_tokens(engine))) == 10


def test_a_step_with_enough_prompt_tokens_starts_no_further_prompt() -> None:
    engine = make_engine(step_tokens=30, chunk_tokens=30, max_start_tokens=6, cache="none")
    for name, length in (("a", 4), ("b", 4), ("c", 6), ("d", 40), ("e", 3)):
        ask(engine, name, length, 2)
    finish(engine)
    assert new_tokens(engine) == [[4, 4], [1, 1, 6], [1, 29], [11], [1, 3], [1]], "decoding does not count"


def test_more_prompts_start_together_where_each_has_one_token() -> None:
    engine = make_engine(step_tokens=60, chunk_tokens=60, max_start_tokens=6, cache="none")
    for name, length, tokens in (("a", 8, 1), ("b", 9, 1), ("c", 8, 1), ("d", 5, 1), ("e", 5, 2), ("f", 3, 1)):
        ask(engine, name, length, tokens)
    finish(engine)
    assert new_tokens(engine) == [[8, 9, 8], [5, 5, 3], [1]], "24 tokens of those, and then no others overtake"


def test_a_step_with_enough_prompts_starts_no_further_one() -> None:
    engine = make_engine(step_tokens=30, chunk_tokens=6, max_prompts=2, cache="none")
    for name, length in (("a", 4), ("b", 9), ("c", 2), ("d", 3)):
        ask(engine, name, length, 2)
    finish(engine)
    assert new_tokens(engine) == [[4, 6], [1, 3, 2], [1, 1, 3], [1]], "begun ones count, decoding does not"


def test_while_sequences_decode_prompts_are_cut() -> None:
    """A step of the fake engine takes 10 ms and one more for each token: 16 make one of 11 ms 2.5 times as long.

    Two prompts have the room of two.
    """
    engine = make_engine(step_tokens=60, chunk_tokens=60, max_decode_gap=2.5, pace=Pace, cache="none")
    ask(engine, "a", 40, 30)
    for _ in range(8):
        step(engine)
    for name in ("b", "c"):
        ask(engine, name, 80, 2)
    finish(engine)
    made = new_tokens(engine)
    assert made[0] == [40], "nothing decodes"
    mixed = [counts for counts in made if counts[0] == 1 and sum(counts) > len(counts)]
    assert mixed
    assert 16 <= max(sum(count for count in counts if count > 1) for counts in mixed) <= 32
    assert sum(map(sum, made)) == 40 + 29 + 2 * (80 + 1)


def test_preemption_is_not_bound_by_the_pace_of_the_step_before() -> None:
    """It asks for a prompt's room before a step has any; the last one's rest would have it displace one for nothing."""
    engine = make_engine(step_tokens=60, chunk_tokens=60, max_decode_gap=2.5, pace=Pace, cache="none")
    ask(engine, "a", 40, 30)
    for _ in range(8):
        step(engine)
    ask(engine, "b", 80, 2)
    step(engine)
    chunking = engine.scheduler._chunking
    waiting = engine.scheduler._by_request["b"][0]
    assert [chunking.size(waiting, 50, budget) for budget in (60, 20, 1)] == [50, 20, 1]
    finish(engine)


def test_chunked_prefill_size_bounds_a_prompts_part_of_a_step() -> None:
    engine = make_engine(step_tokens=30, chunk_tokens=7, cache="none")
    ask(engine, "a", 20, 1)
    ask(engine, "b", 20, 1)
    finish(engine)
    assert new_tokens(engine) == [[7, 7], [7, 7], [6, 6]]


def test_without_chunks_a_prompt_waits_for_a_step_with_room_for_all_of_it() -> None:
    engine = make_engine(step_tokens=30, chunk_tokens=None, cache="none")
    for name, length in (("a", 20), ("b", 20), ("longer than a step", 70)):
        ask(engine, name, length, 1)
    finish(engine)
    assert new_tokens(engine) == [[20], [20, 10], [30], [30]]


def test_decoding_is_not_held_up_by_a_long_prompt() -> None:
    """An older prompt that takes all of a step's tokens leaves one to every sequence that decodes."""
    engine = make_engine(policy="sjf", step_tokens=16, chunk_tokens=16, num_blocks=100, max_len=300)
    ask(engine, "long", 200, 2)
    ask(engine, "short", 4, 30)
    assert finish(engine) == ["long", "short"]
    steps = [sizes for sizes in new_tokens(engine) if len(sizes) == 2]
    assert len(steps) >= 13
    assert all(sizes[0] == 1 for sizes in steps[1:13])


@pytest.mark.parametrize("is_mixed", [True, False])
def test_mixed_chunks(is_mixed: bool) -> None:
    engine = make_engine(step_tokens=16, chunk_tokens=8, is_mixed=is_mixed, cache="none")
    ask(engine, "first", 4, 20)
    step(engine)
    ask(engine, "second", 24, 4)
    finish(engine)
    kinds = ["".join(sorted({"d" if n == 1 else "p" for n in sizes})) for sizes in new_tokens(engine)]
    assert ("dp" in kinds) == is_mixed
    if not is_mixed:
        assert kinds[:7] == ["p", "d", "p", "d", "p", "d", "p"], "prompts and decoding take turns"


@pytest.mark.parametrize("steps", [1, 4])
def test_continuous_decode_steps_pass_between_two_looks_at_the_queue(steps: int) -> None:
    engine = make_engine(admission_interval=steps, cache="none")
    ask(engine, "first", 4, 40)
    starts: list[int] = []
    for i in range(24):
        step(engine)
        if batches(engine)[-1].new:
            starts.append(i)
        ask(engine, f"r{i}", 4, 1)
    gaps = {later - earlier for earlier, later in pairwise(starts[1:])}
    assert gaps == {steps}


def test_an_idle_engine_looks_at_the_queue_at_once() -> None:
    engine = make_engine(admission_interval=1000)
    for i in range(3):
        ask(engine, f"r{i}")
        assert finish(engine, limit=10) == [f"r{i}"]


def test_conservativeness_trades_pre_emptions_for_sequences_at_once() -> None:
    preemptions, at_once = [], []
    for conservativeness in (0.0, 1.0, 4.0, 10.0):
        engine = make_engine(num_blocks=24, cache="none", conservativeness=conservativeness, max_running=8)
        for i in range(20):
            ask(engine, f"r{i}", 6, 30)
        finish(engine)
        preemptions.append(engine.stats().preemptions)
        at_once.append(max(map(len, new_tokens(engine))))
    assert preemptions == sorted(preemptions, reverse=True)
    assert preemptions[0] > 3 * max(preemptions[2], 1)
    assert preemptions[-1] == 0
    assert at_once == sorted(at_once, reverse=True)
    assert at_once[0] > at_once[-1]


def config(**given: Any) -> Any:
    return build_config(discover(), given)


def test_the_flags() -> None:
    assert config(disable_chunked_prefill=True).engine.chunked_prefill_size == -1
    assert config(enable_priority_scheduling=True).engine.schedule_policy == "priority"
    planning = config(router_max_wait_tokens=3).plugin_options["features.step_planning"]
    assert planning["num_continuous_decode_steps"] == 3
    for given, words in (
        ({"chunked_prefill_size": 0}, "must be -1"),
        ({"schedule_conservativeness": -1}, "greater than or equal to 0"),
        ({"num_continuous_decode_steps": 0}, "greater than or equal to 1"),
        ({"schedule_low_priority_values_first": True}, "not selected"),
        ({"enable_priority_scheduling": True, "schedule_policy": "lof"}, "both set --schedule-policy"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**given)


@pytest.mark.parametrize(
    ("service", "field"),
    [
        (Service(session="s" * 257), "session_id"),
        (Service(session="a\nb"), "session_id"),
        (Service(tier="t" * 257), "service_tier"),
        (Service(deadline=0.0), "deadline"),
        (Service(deadline=86_401.0), "deadline"),
        (Service(deadline=float("nan")), "deadline"),
    ],
)
def test_hints_are_checked_at_the_door(service: Service, field: str) -> None:
    item = GenerateInput([1], SamplingParams(max_tokens=1), service=service)
    with pytest.raises(InvalidRequest) as caught:
        prepare_input(item, None, max_model_len=10, vocab_size=10)  # type: ignore[arg-type]
    assert caught.value.param == field
    with pytest.raises(InvalidRequest):
        check_embed_input(EmbedInput([1], service=service), max_model_len=10, vocab_size=10)


@pytest.mark.parametrize(
    ("device", "given", "expected", "start", "gap"),
    [
        ("cpu", {}, 512, 16, 2.5),
        ("cpu", {"max_running_requests": 300}, 600, 16, 2.5),
        ("cpu", {"max_prefill_tokens": 100, "max_start_tokens": 20, "max_decode_gap": 4}, 100, 20, 4),
        ("cpu", {"max_decode_gap": 0}, 512, 16, None),
        ("cuda", {}, 2048, 2048, None),
        ("cuda", {"max_start_tokens": 1, "max_decode_gap": 3}, 2048, 1, 3),
    ],
)
def test_how_many_tokens_a_step_has_unless_it_is_said(
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    given: dict[str, object],
    expected: int,
    start: int,
    gap: float | None,
) -> None:
    plugins = discover()
    config = build_config(plugins, {"model": str(tiny_folder), "load_format": "dummy", **given})
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    setup = resolve.resolve(config, open_model(config, plugins, print), plugins)
    assert (setup.max_step_tokens, setup.max_start_tokens, setup.max_decode_gap) == (expected, start, gap)
