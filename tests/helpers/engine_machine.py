"""An engine without a model, run to its end by hand or by hypothesis."""

from __future__ import annotations

import random

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fwk.engine.core import Engine
from fwk.features.engine import EngineFeatures
from fwk.features.wire import packed
from fwk.interfaces.feature import EnginePartContext
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy
from fwk.types import Request, SamplingParams, Service
from fwk_features.prompt_logprobs import Scored, features
from fwk_features.prompt_logprobs.engine import PromptLogprobsEngine
from fwk_features.step_planning.pace import Pace
from fwk_kit.testing.base import installed
from fwk_kit.testing.fake_engine import NUM_LOOKAHEAD, VOCAB, make_engine, make_policy, next_token, reference

OPTIONS: dict[str, dict[str, object]] = {"random": {"random_order_seed": 7}}  # what hypothesis finds, it finds again


POLICIES = [item.name for item in installed().family("schedulers")]


PLAIN = Service()


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    n: int = 1,
    priority: int = 0,
    service: Service = PLAIN,
    **sampling: object,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
    made = Request(request_id=name, prompt_token_ids=prompt, sampling=params, n=n, priority=priority, service=service)
    num_top = params.prompt_logprobs
    return made if num_top is None else msgspec.structs.replace(made, features={SCORING.name: packed(Scored(num_top))})


[SCORING] = features()


def scoring(engine: Engine) -> Engine:
    """The same, with the part of the feature that computes prompts whole; its fake worker scores none."""
    part = PromptLogprobsEngine(EnginePartContext(SCORING.name, lambda *args: [], SCORING.wire))
    engine.scheduler.parts = engine.scheduler._queue._parts = EngineFeatures([part])
    return engine


def run(engine: Engine, limit: int = 10_000) -> dict[tuple[str, int], list[int]]:
    """Step until idle; the output of every sequence."""
    outputs: dict[tuple[str, int], list[int]] = {}
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        for event in engine.step():
            outputs.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    raise AssertionError("the engine does not come to an end")


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    engine.scheduler.check()


def prompts(count: int, seed: int = 0, shared: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    return [prefix + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


class Contrary(SchedulePolicy):
    """Answers everything badly: strangers and repeats, absurd chunks, victims that are not there."""

    def __init__(self, seed: int) -> None:
        super().__init__(ScheduleContext())
        self.rng = random.Random(seed)

    def order(self, waiting, view):  # type: ignore[no-untyped-def]
        items = list(waiting)
        self.rng.shuffle(items)
        return [object(), *items, *items, None]

    def admit(self, sequence, num_blocks, view):  # type: ignore[no-untyped-def]
        return self.rng.random() < 0.7

    def victim(self, running, view):  # type: ignore[no-untyped-def]
        return self.rng.choice([*running, None])

    def chunk(self, sequence, remaining, budget, view):  # type: ignore[no-untyped-def]
        return self.rng.randint(-5, 100)

    def rank(self, sequence, view):  # type: ignore[no-untyped-def]
        return self.rng.random()

    def choose_preemption_victim(self, sequence, running, view):  # type: ignore[no-untyped-def]
        return self.rng.choice([*running, None, None, object()])


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, pre-emption, forks and steps in any order."""

    @initialize(
        num_blocks=st.integers(8, 40),
        block_size=st.sampled_from([1, 3, 4]),
        cache=st.sampled_from(["radix", "none"]),
        policy=st.sampled_from([*POLICIES, "contrary"]),
        depth=st.integers(1, 3),
        step_tokens=st.integers(1, 40),
        drafts=st.booleans(),
        num_lookahead=st.sampled_from([NUM_LOOKAHEAD, NUM_LOOKAHEAD, 0]),  # 0: forced tokens, without a decoder
        chunk_tokens=st.sampled_from([None, 3, 32]),
        conservativeness=st.sampled_from([0.0, 1.0, 5.0]),
        is_mixed=st.booleans(),
        admission_interval=st.sampled_from([1, 1, 4]),
        max_start_tokens=st.sampled_from([None, 1, 6]),
        max_decode_gap=st.sampled_from([None, 1.0, 2.5]),
        num_window_groups=st.sampled_from([0, 0, 1, 2]),
        window=st.sampled_from([1, 4, 7, 16]),
        num_state_places=st.sampled_from([None, None, 0, 1, 2, 6]),
        state_interval=st.sampled_from([1, 4, 9]),
    )
    def start(self, num_blocks, block_size, cache, policy, depth, step_tokens, drafts, **limits) -> None:  # type: ignore[no-untyped-def]
        rng = random.Random(num_blocks)
        if limits["num_state_places"] is not None:  # windows do not go with recurrent layers
            limits["num_window_groups"] = 0

        def draft(tokens: list[int]) -> list[int]:
            return [next_token(tokens)][: rng.randint(0, 1)] + [rng.randrange(VOCAB)] * rng.randint(0, 2)

        engine = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            cache=cache,
            policy=policy if policy != "contrary" else "fcfs",
            policy_object=Contrary(num_blocks) if policy == "contrary" else None,
            policy_options=OPTIONS.get(policy),
            depth=depth,
            step_tokens=step_tokens,
            max_running=5,
            max_len=64,
            draft=draft if drafts else None,
            pace=Pace,
            **limits,
        )
        self.engine = scoring(engine)
        self.room = self.engine.scheduler.max_sequence_tokens
        if not limits.get("num_window_groups"):
            assert self.room == min(64, num_blocks * block_size)
        self.count = 0
        self.open: dict[tuple[str, int], list[int]] = {}
        self.wanted: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.paused: set[str] = set()

    @rule(
        shared=st.integers(0, 30), own=st.lists(st.integers(0, 3), min_size=1, max_size=12), n=st.integers(1, 3),
        max_tokens=st.integers(1, 20), priority=st.sampled_from([-30, 0, 5, 20]), who=st.sampled_from(["", "a", "b"]),
        logprobs=st.sampled_from([None, None, 1]),
    )  # fmt: skip
    def arrive(  # type: ignore[no-untyped-def]
        self, shared: int, own: list[int], n: int, max_tokens: int, priority: int, who: str, logprobs
    ) -> None:
        prompt = [7] * shared + own
        name = f"r{self.count}"
        self.count += 1
        service = Service(tenant=who, session=who, tier="flex" if who else "", deadline=0.5 if priority else None)
        events = self.engine.add(request(name, prompt, max_tokens, n, priority, service, prompt_logprobs=logprobs))
        assert bool(events) == (len(prompt) + max_tokens > self.room)
        for i in range(0 if events else n):
            self.open[name, i] = []
            self.wanted[name, i] = reference(prompt, max_tokens)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    # What is drawn depends on nothing that was computed: tiers that read ahead take as long as they take.
    @rule(which=st.integers(0, 2**16), whole=st.booleans())
    def abort(self, which: int, whole: bool) -> None:
        if not self.open:
            return
        name, index = sorted(self.open)[which % len(self.open)]
        self.take(self.engine.abort(name, None if whole else index))
        assert (name, index) not in self.open
        assert self.engine.abort(name, index) == []  # twice is nobody's fault

    @rule(which=st.integers(0, 2**16), is_on=st.booleans())
    def pause(self, which: int, is_on: bool) -> None:
        if not self.open:
            return
        name, _ = sorted(self.open)[which % len(self.open)]
        self.engine.scheduler.pause(name, is_on)
        (self.paused.add if is_on else self.paused.discard)(name)

    @rule(policy=st.sampled_from(POLICIES))
    def switch_policy(self, policy: str) -> None:
        self.engine.scheduler.switch_policy(make_policy(policy, OPTIONS.get(policy)), policy)

    def take(self, events) -> None:  # type: ignore[no-untyped-def]
        for event in events:
            key = (event.request_id, event.index)
            assert key in self.open, "an event of a sequence that has ended"
            assert event.request_id not in self.paused or event.finish_reason == "abort"
            self.open[key].extend(event.token_ids)
            if event.finish_reason is not None:
                output = self.open.pop(key)
                assert key not in self.ended
                self.ended.add(key)
                wanted = self.wanted[key]
                assert output == (wanted if event.finish_reason == "length" else wanted[: len(output)])

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for name in self.paused:  # some have ended meanwhile
                self.engine.scheduler.pause(name, False)
            self.paused.clear()
            for _ in range(5_000):
                if not self.engine.has_work:
                    break
                self.take(self.engine.step())
            assert not self.open, "accepted, but never ended"
            assert_idle(self.engine)
