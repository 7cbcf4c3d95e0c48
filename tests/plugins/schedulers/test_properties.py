"""What each schedule policy promises, on the fake engine with the real scheduler."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.helpers.scheduling import Clock, ask, batches, finish, step

from fwk.engine.core import Engine
from fwk.errors import ConfigError
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy
from fwk.types import tenant_of
from fwk_kit.testing.fake_engine import make_engine, reference

QUESTIONS = [
    "rank",
    "order",
    "admit",
    "victim",
    "choose_preemption_victim",
    "chunk",
    "on_waiting",
    "on_started",
    "on_finished",
]
SOURCES = Path(__file__).parents[3] / "plugins/schedulers/fwk_schedulers"


def one_at_a_time(policy: str, clock: Clock | None = None, **options: Any) -> Engine:
    """An engine that runs one sequence at a time, so that requests end in the order in which they started."""
    return make_engine(policy=policy, policy_options=options, max_running=1, now=clock or Clock(), num_blocks=64)


# sjf


def test_sjf_starts_the_shortest_job_first() -> None:
    engine = one_at_a_time("sjf")
    for name, prompt, max_tokens in (("long", 40, 4), ("talkative", 4, 30), ("short", 4, 2), ("middle", 10, 10)):
        ask(engine, name, prompt, max_tokens)
    assert finish(engine) == ["short", "middle", "talkative", "long"]


@pytest.mark.parametrize(("aging", "starves"), [(10.0, False), (0.0, True)])
def test_sjf_ages(aging: float, starves: bool) -> None:
    """A job longer by 40 tokens is overtaken for four seconds at ten tokens a second; without ageing, for ever."""
    clock = Clock()
    engine = one_at_a_time("sjf", clock, sjf_aging=aging)
    ask(engine, "running")
    ask(engine, "long", 44)
    overtakers = 0
    for i in range(30):
        ask(engine, f"short{i}", 4)
        ended: list[str] = []
        while not ended:
            ended = step(engine)
        if "long" in ended:
            break
        overtakers += 1
        clock.seconds += 1
    assert ("long" not in ended) == starves
    assert starves or overtakers <= 6


# lof, random, dfs-weight


def test_lof_starts_the_longest_output_first() -> None:
    engine = one_at_a_time("lof")
    for name, max_tokens in (("a", 3), ("b", 9), ("c", 6), ("d", 9)):
        ask(engine, name, max_tokens=max_tokens)
    assert finish(engine) == ["b", "d", "c", "a"]


def test_random_starts_each_as_often_as_any_other() -> None:
    firsts: Counter[str] = Counter()
    for seed in range(300):
        engine = one_at_a_time("random", random_order_seed=seed)
        for name in "abcde":
            ask(engine, name, max_tokens=1)
        firsts[finish(engine)[0]] += 1
    # chi-square with four degrees of freedom; beyond 18.5 in one of a thousand tries
    assert sum((count - 60) ** 2 / 60 for count in firsts.values()) < 18.5
    assert len(firsts) == 5


def test_random_with_a_seed_is_the_same_again() -> None:
    orders = []
    for _ in range(2):
        engine = one_at_a_time("random", random_order_seed=7)
        for i in range(20):
            ask(engine, f"r{i}", max_tokens=1)
        engine.abort("r3")
        orders.append(finish(engine))
    assert orders[0] == orders[1]
    assert orders[0] != sorted(orders[0], key=lambda name: int(name[1:]))
    assert set(orders[0]) == {f"r{i}" for i in range(20) if i != 3}


def test_dfs_weight_keeps_families_together_the_largest_first() -> None:
    engine = make_engine(policy="dfs-weight", step_tokens=400, chunk_tokens=400, num_blocks=200)
    two, three = [1] * 16, [2] * 16
    twins = [2] * 32  # a branch of the family of three
    prompts = {"alone": [5] * 20, "two-a": [*two, 3], "three-a": [*three, 4], "twin-a": [*twins, 1]}
    prompts |= {"two-b": [*two, 6], "short": [2], "twin-b": [*twins, 2]}
    for name, prompt in prompts.items():
        ask(engine, name, prompt, max_tokens=1)
    step(engine)
    started = [new.token_ids for new in batches(engine)[0].new]
    names = ["twin-a", "twin-b", "three-a", "two-a", "two-b", "alone", "short"]
    assert [tokens[: len(prompts[name])] for name, tokens in zip(names, started, strict=True)] == [
        prompts[name] for name in names
    ]
    policy: Any = engine.scheduler.policy
    assert not policy._below.keys() - {0}, "branches are forgotten with their last sequence"


# session


def test_a_sessions_next_turn_starts_before_others() -> None:
    clock = Clock()
    engine = one_at_a_time("session", clock, session_max_wait=5)
    ask(engine, "turn-1", session="s", max_tokens=3)
    step(engine)
    for i in range(3):
        ask(engine, f"other{i}", session=f"o{i}")
    ask(engine, "turn-2", session="s")
    ask(engine, "other tenant's", session="s", tenant="t")
    assert finish(engine) == ["turn-1", "turn-2", "other0", "other1", "other2", "other tenant's"]


def test_sessions_starve_nobody() -> None:
    clock = Clock()
    engine = one_at_a_time("session", clock, session_max_wait=5)
    ask(engine, "turn", session="s")
    step(engine)
    ask(engine, "stranger")
    waited = 0
    for i in range(40):
        ask(engine, f"turn{i}", session="s")
        ended: list[str] = []
        while not ended:
            ended = step(engine)
        clock.seconds += 1
        waited += 1
        if "stranger" in ended:
            break
    assert 5 <= waited <= 7


# fair


def served(engine: Engine, tenants: dict[str, int], steps: int, max_tokens: int = 12) -> dict[str, int]:
    """Generated tokens by tenant, where each always has a backlog of prompts of a length of its own."""
    tokens: Counter[str] = Counter()
    sent = 0
    open_by: Counter[str] = Counter()
    for _ in range(steps):
        for tenant, prompt_len in tenants.items():
            while open_by[tenant] < 12:
                ask(engine, f"{tenant}/{sent}", prompt_len, max_tokens, tenant=tenant_of(tenant))
                sent += 1
                open_by[tenant] += 1
        for event in engine.step():
            tenant = event.request_id.partition("/")[0]
            tokens[tenant] += len(event.token_ids)
            open_by[tenant] -= event.finish_reason is not None
    return tokens


def test_fair_share_follows_the_weights() -> None:
    engine = make_engine(policy="fair", policy_options={"fair_share_weights": ("gold=3", "silver=1")}, max_running=4)
    tokens = served(engine, {"gold": 8, "silver": 8}, 1500)
    assert tokens["gold"] / tokens["silver"] == pytest.approx(3, rel=0.1)


def test_fair_share_counts_tokens_and_not_requests() -> None:
    """Requests of one are three times as expensive: it gets a third as many."""
    engine = make_engine(policy="fair", policy_options={"fair_share_output_cost": 1.0}, max_running=4, cache="none")
    tokens = served(engine, {"cheap": 4, "dear": 36}, 1500)  # 4 + 12 and 36 + 12
    assert tokens["cheap"] / tokens["dear"] == pytest.approx(3, rel=0.1)


def test_a_flood_delays_nobody_else() -> None:
    engine = make_engine(policy="fair", max_running=2)
    for i in range(300):
        ask(engine, f"flood{i}", tenant="flood")
    for _ in range(20):
        step(engine)
    ask(engine, "guest", tenant="guest")
    before = 0
    while "guest" not in (ended := step(engine)):
        before += len(ended)
    assert before <= 3


def test_who_was_idle_has_saved_nothing_up() -> None:
    engine = make_engine(policy="fair", max_running=2)
    ask(engine, "early", tenant="late")
    finish(engine)
    tokens = served(engine, {"busy": 4}, 400)
    assert tokens["busy"] > 500
    tokens = served(engine, {"busy": 4, "late": 4}, 400)
    assert tokens["busy"] / tokens["late"] == pytest.approx(1, rel=0.15)


@pytest.mark.sweep
def test_fair_share_forgets_tenants_in_the_end() -> None:
    engine = make_engine(policy="fair", num_blocks=8)
    policy: Any = engine.scheduler.policy
    for i in range(10_100):
        ask(engine, f"r{i}", 1, 1, tenant=str(i))
        if i % 100 == 99:
            finish(engine)
    assert len(policy._used) <= 10_001
    assert not policy._charged


# sla


def test_sla_starts_by_deadline() -> None:
    clock = Clock()
    engine = one_at_a_time("sla", clock, sla_tiers=("gold=1", "slow=100"), sla_default=10)
    ask(engine, "slow", tier="slow")
    ask(engine, "plain")
    ask(engine, "unknown", tier="iron")
    ask(engine, "gold", tier="gold")
    ask(engine, "own", tier="slow", deadline=0.5)
    clock.seconds = 9.5
    ask(engine, "late gold", tier="gold")
    assert finish(engine) == ["own", "gold", "plain", "unknown", "late gold", "slow"]


def test_sla_starves_nobody() -> None:
    clock = Clock()
    engine = one_at_a_time("sla", clock, sla_tiers=("gold=1",), sla_default=10)
    ask(engine, "plain")
    for i in range(30):
        ask(engine, f"gold{i}", tier="gold")
        ended: list[str] = []
        while not ended:
            ended = step(engine)
        if "plain" in ended:
            break
        clock.seconds += 1
    assert clock.seconds == 9


def test_sla_pre_empts_the_latest_deadline() -> None:
    engine = make_engine(policy="sla", num_blocks=16, cache="none", max_running=4, now=Clock())
    ask(engine, "slow", 4, 50, tier="flex")
    for i in range(3):
        ask(engine, f"urgent{i}", 4, 16, tier="priority")
    ended = finish(engine)
    assert engine.stats().preemptions > 0
    assert ended[-1] == "slow"


# priority


def test_priority_orders_by_priority_and_then_by_arrival() -> None:
    for low_first in (False, True):
        engine = one_at_a_time("priority", schedule_low_priority_values_first=low_first)
        for name, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 5)):
            ask(engine, name, priority=priority)
        assert finish(engine) == (["c", "a", "b", "d"] if low_first else ["b", "d", "a", "c"])


@pytest.mark.parametrize(("difference", "preempts"), [(9, False), (10, True)])
@pytest.mark.parametrize("low_first", [False, True])
def test_priority_pre_empts_from_the_threshold_on(difference: int, preempts: bool, low_first: bool) -> None:
    engine = one_at_a_time(
        "priority", schedule_low_priority_values_first=low_first, priority_scheduling_preemption_threshold=10
    )
    ask(engine, "running", max_tokens=20)
    step(engine)
    ask(engine, "urgent", priority=-difference if low_first else difference)
    assert finish(engine) == (["urgent", "running"] if preempts else ["running", "urgent"])
    assert engine.stats().preemptions == preempts


def test_priority_pre_empts_the_least_urgent_and_of_these_the_youngest() -> None:
    engine = make_engine(policy="priority", max_running=3, num_blocks=64)
    for name, priority in (("middle", 20), ("low-old", 0), ("low-young", 0)):
        ask(engine, name, 4, 40, priority=priority)
        step(engine)
    for i in range(2):
        ask(engine, f"urgent{i}", 4, 4, priority=30)
        step(engine)
        assert engine.stats().preemptions == i + 1
    running = {sequence.request.request_id for sequence in engine.scheduler._running}
    assert running == {"middle", "urgent0", "urgent1"}
    assert set(finish(engine)) == {"middle", "low-old", "low-young", "urgent0", "urgent1"}


def test_priority_passes_a_long_prompt_that_takes_every_step_whole() -> None:
    """What is urgent does not wait for the chunks of what is not, and what was computed of these is not lost."""
    engine = make_engine(policy="priority", max_len=400, num_blocks=200, step_tokens=16, chunk_tokens=16)
    ask(engine, "long", 320, 4)
    for _ in range(5):
        step(engine)
    ask(engine, "urgent", 8, 4, priority=50)
    steps = 0
    while "urgent" not in step(engine):
        steps += 1
    assert steps < 6
    finish(engine)
    computed = sum(s.num_new_tokens for batch in batches(engine) for s in batch.sequences)
    assert computed <= 320 + 8 + 8 + 16


def test_pre_empted_for_a_priority_the_output_is_the_same() -> None:
    for cache in ("radix", "none"):
        for depth in (1, 2):
            engine = make_engine(policy="priority", max_running=2, num_blocks=40, cache=cache, depth=depth)
            wanted: dict[str, list[int]] = {}
            outputs: dict[str, list[int]] = {}
            for i in range(30):
                name, prompt = f"r{i}", [i % 7, i % 5, i]
                ask(engine, name, prompt, 12, priority=i * 17 % 60)
                wanted[name] = reference(prompt, 12)
                for event in engine.step():
                    outputs.setdefault(event.request_id, []).extend(event.token_ids)
            while engine.has_work:
                for event in engine.step():
                    outputs.setdefault(event.request_id, []).extend(event.token_ids)
            assert outputs == wanted
            assert engine.stats().preemptions >= 3


# All of them


@pytest.mark.parametrize("name", ["sjf", "session", "fair", "sla", "priority", "random_order", "dfs_weight", "lof"])
def test_a_policy_takes_at_most_40_lines(name: str) -> None:
    """Lines of code: no blank ones, docstrings, imports or comments."""
    text = (SOURCES / name / "policy.py").read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = [line.strip() for i, line in enumerate(text.splitlines(), 1) if i not in skipped]
    assert len([line for line in lines if line and not line.startswith("#")]) <= 40


class NoOrder:
    """Stands before everything, itself among it, or cannot be asked."""

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer

    def __lt__(self, other: object) -> bool:
        if self.answer is None:
            raise KeyError
        return self.answer


class Erratic:
    """Stands elsewhere each time it is looked at."""

    dice = Random(1)

    def __lt__(self, other: object) -> bool:
        return other is not self and self.dice.random() < 0.5


def _raise(error: type[BaseException]) -> Any:
    raise error


def _repeated(self: Any, waiting: Any, view: Any) -> Any:
    while True:
        yield from waiting


WRONG: list[tuple[str, Any]] = [
    *((question, lambda *args: _raise(ZeroDivisionError)) for question in QUESTIONS),
    ("chunk", lambda *args: _raise(SystemExit)),
    *(("chunk", lambda *args, x=x: x) for x in (None, 2.5, "4", float("nan"), [3])),
    *(("rank", lambda *args, x=x: x) for x in (None, float("nan"), (1, float("nan")), object(), {}, 1j)),
    ("rank", lambda self, sequence, view: "first" if sequence.order % 2 else 2),
    ("rank", lambda self, sequence, view: (0, "first" if sequence.order % 2 else 2)),
    *(("rank", lambda *args, x=x: NoOrder(x)) for x in (True, None)),
    ("rank", lambda *args: Erratic()),
    *(("order", lambda *args, x=x: x) for x in (None, 7, ["r0"], (), [None, object()])),
    ("order", _repeated),
    ("admit", lambda *args: None),
]


@pytest.mark.parametrize(("question", "wrong"), WRONG, ids=[f"{q}-{i}" for i, (q, _) in enumerate(WRONG)])
def test_a_policy_that_fails_is_replaced_and_named(question: str, wrong: Any) -> None:
    policy = type("Wrong", (SchedulePolicy,), {question: wrong})(ScheduleContext())
    clock = Clock()
    engine = make_engine(policy_object=policy, num_blocks=8, cache="none", max_running=4, now=clock, keeps_policy=False)
    ended: list[str] = []
    for i in range(6):
        ask(engine, f"r{i}", 3, 20)
        ended += step(engine)
        ended += step(engine)
        clock.seconds += 4.0
    ended += finish(engine)
    assert sorted(ended) == [f"r{i}" for i in range(6)], "no request is lost"
    (trouble,) = engine.stats().troubles or ("",)
    assert f"'Wrong' failed in {question}: " in trouble
    ask(engine, "later", 3, 20)
    assert finish(engine) == ["later"], "others answer from then on"


@pytest.mark.parametrize(
    "answers",
    [
        {"victim": lambda *args: "r1", "choose_preemption_victim": lambda *args: 7},
        {"chunk": lambda *args: -3},
        {"chunk": lambda *args: 10**9},
        {"order": lambda self, waiting, view: [*waiting, *waiting]},
        {"rank": lambda self, sequence, view: np.float32(sequence.order)},
        {"chunk": lambda *args: np.int64(2), "admit": lambda *args: np.True_},
    ],
    ids=lambda answers: "-".join(answers),
)
def test_answers_that_are_taken_as_they_can_be(answers: dict[str, Any]) -> None:
    engine = make_engine(
        policy_object=type("Odd", (SchedulePolicy,), answers)(ScheduleContext()), num_blocks=8, cache="none"
    )
    for i in range(6):
        ask(engine, f"r{i}", 3, 20)
    assert len(finish(engine)) == 6
    assert engine.stats().troubles == ()


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("sla", {"sla_tiers": ("gold",)}, "NAME=SECONDS"),
        ("sla", {"sla_tiers": ("gold=0",)}, "above 0"),
        ("sla", {"sla_tiers": ("gold=1", "gold=2")}, "once"),
        ("fair", {"fair_share_weights": ("sk-secret",)}, "entry 1"),
        ("fair", {"fair_share_weights": ("a=1", "sk-secret=0")}, "entry 2"),
        ("fair", {"fair_share_weights": ("a=1", "a=2")}, "once"),
        ("priority", {"priority_scheduling_preemption_threshold": 0}, "threshold"),
    ],
)
def test_wrong_options_are_refused_and_no_key_is_told(policy: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_engine(policy=policy, policy_options=options)
    assert "sk-secret" not in str(caught.value)


class Compared:
    """A rank that counts how often it is looked at."""

    num_comparisons = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __lt__(self, other: Compared) -> bool:
        Compared.num_comparisons += 1
        return self.value < other.value


@pytest.mark.gate(1)
@pytest.mark.parametrize("num_waiting", [100, 20_000])
def test_ranks_of_a_long_queue_are_hardly_looked_at(num_waiting: int) -> None:
    class Counting(SchedulePolicy):
        def rank(self, sequence: Any, view: Any) -> Compared:
            return Compared(hash(sequence.request.request_id) % 1000)

    engine = make_engine(policy_object=Counting(ScheduleContext()), max_running=2, check_blocks=False)
    for i in range(num_waiting):
        ask(engine, f"r{i}", [1, 2, 3], 2)
    for _ in range(10):
        step(engine)
    Compared.num_comparisons = 0
    for _ in range(100):
        step(engine)
    assert Compared.num_comparisons < 100 * 40
