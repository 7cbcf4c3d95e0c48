"""The reserve policy: room for outputs is foreseen, as far as its options say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.scheduling import ask, finish

from fwk.engine.core import Engine
from fwk_kit.testing.fake_engine import make_engine
from fwk_schedulers.reserve.policy import most_blocks


def run(policy: str = "reserve", count: int = 12, **options: float) -> tuple[int, int]:
    """Pre-emptions and the most sequences at once, of requests that grow to 44 tokens in a cache of 128."""
    engine = make_engine(num_blocks=32, policy=policy, policy_options=options, cache="none")
    for i in range(count):
        ask(engine, f"r{i}", 4, 40)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, engine.stats().num_running)

    finish(engine, look)
    return engine.stats().preemptions, most


def test_nothing_is_preempted_where_outputs_are_foreseen() -> None:
    assert run("fcfs")[0] > 0
    assert run() == (0, 3)  # of 11 blocks each: the third starts late enough to outlive the others


def test_only_so_much_of_an_output_is_foreseen() -> None:
    preemptions, most = run(router_max_new_token_len=8)
    assert preemptions > 0
    assert most > 3


def test_room_is_kept_only_from_a_share_in_use_on() -> None:
    assert run(router_token_ratio=0.5)[1] > 3
    assert run(router_token_ratio=1.0) == run("fcfs")


def test_a_share_stays_free() -> None:
    assert run(router_token_ratio=1.0, scheduler_reserve_resource_ratio=75)[1] < run("fcfs")[1]


def test_long_prompts_under_way_are_counted() -> None:
    engine: Engine = make_engine(num_blocks=32, step_tokens=8, chunk_tokens=8, policy="reserve", cache="none")
    ask(engine, "long", 100, 4)
    engine.step()
    ask(engine, "next", 20, 4)  # with the long one's chunks to come there is no room for it
    engine.step()
    assert engine.stats().num_running == 1
    finish(engine)
    assert engine.stats().preemptions == 0


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=6))
def test_the_most_is_that_of_a_simulation(outputs: list[tuple[int, int]]) -> None:
    most = 0
    for now in range(13):
        alive = [pair for pair in outputs if pair[0] >= now]
        ended = [pair for pair in outputs if pair[0] < now]
        if alive:
            most = max(most, len(alive) * now - sum(generated for _, generated in ended))
    assert most_blocks(outputs, 1) == most
