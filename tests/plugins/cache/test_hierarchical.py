"""The cache with tiers, under the real scheduler on a fake worker whose K/V memory is real."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from tests.helpers.dict_tier import DictTier
from tests.helpers.engine_machine import EngineMachine, assert_idle, prompts, request, run, scoring
from tests.helpers.tiered import Tiered

from fwk.engine.core import Engine
from fwk.interfaces.prefix_cache import BlockTransfer, CacheContext, CacheTier, CacheTierContext
from fwk.plugins import discover
from fwk.types import Request, SamplingParams
from fwk_cache.hierarchical import HierarchicalOptions
from fwk_cache.hierarchical.cache import HierarchicalCache
from fwk_cache.host import HostOptions
from fwk_cache.host.tier import HostTier
from fwk_cache.tiers.transfer import WorkerTransfer
from fwk_kit.testing.fake_engine import VOCAB, FakeExecutor, make_engine, next_token, reference


def host(places: int) -> Callable[[CacheTierContext], list[CacheTier]]:
    """One host tier of that many blocks."""

    def make(context: CacheTierContext) -> list[CacheTier]:
        options = HostOptions(hicache_ratio=places / context.num_blocks)
        return [HostTier(CacheTierContext(context.num_blocks, context.block_bytes, bytes(32), options=options))]

    return make


class FlakyTier(DictTier):
    """Lies about what it has, loses entries, raises, and scribbles where it was to read: never a wrong entry."""

    def __init__(self, context: CacheTierContext, seed: int, rate: float) -> None:
        super().__init__(context)
        self.rng = random.Random(seed)
        self.rate = rate

    def fails(self) -> bool:
        if self.rng.random() < self.rate / 3:
            raise OSError("the tier is away")
        return self.rng.random() < self.rate

    def contains(self, key: bytes) -> bool:
        return super().contains(key) != self.fails()

    def get(self, key: bytes, into: memoryview) -> bool:
        if self.fails():
            into[:] = b"\x55" * len(into)
            return False
        return super().get(key, into)

    def put(self, key: bytes, data: memoryview) -> bool:
        return not self.fails() and super().put(key, data)


class FlakyTierReadAhead(FlakyTier):
    """And so does its reader, in a thread of its own."""

    def reader(self) -> Callable[[bytes, memoryview], bool]:
        return self.get


def serve(engine: Engine, name: str, prompt: list[int], max_tokens: int = 3, namespace: str = "") -> int:
    """Run one request alone, check its output, and return how many tokens of it came back from a tier."""
    before = engine.stats().restored_prompt_tokens
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=params, cache_namespace=namespace))
    assert run(engine)[name, 0] == reference(prompt, max_tokens)
    return engine.stats().restored_prompt_tokens - before


def one_tier(engine_options: dict[str, Any] | None = None) -> tuple[Engine, DictTier]:
    made: list[DictTier] = []

    def make(context: CacheTierContext) -> list[CacheTier]:
        made.append(DictTier(context))
        return list(made)

    options = {"num_blocks": 16, "max_len": 64, **(engine_options or {})}
    engine = make_engine(cache="hierarchical", tiers=Tiered(make), **options)
    return engine, made[0]


def numbers(start: int, count: int) -> list[int]:
    return [(start + i) % VOCAB for i in range(count)]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize(("depth", "is_late"), [(1, False), (2, True), (3, True)])
def test_what_was_evicted_comes_back(policy: str, eviction: str, depth: int, is_late: bool) -> None:
    engine = make_engine(
        cache="hierarchical", num_blocks=30, depth=depth, is_late=is_late, tiers=Tiered(host(400)), step_tokens=24,
        cache_options={"hicache_write_policy": policy, "radix_eviction_policy": eviction},
    )  # fmt: skip
    inputs = prompts(10, seed=4, shared=9, longest=60)
    for turn in range(3):
        for i, prompt in enumerate(inputs):
            engine.add(request(f"{turn}-{i}", prompt, max_tokens=9))
        outputs = run(engine)
        for i, prompt in enumerate(inputs):
            assert outputs[f"{turn}-{i}", 0] == reference(prompt, 9)
    stats = engine.stats()
    assert stats.cached_prompt_tokens > sum(map(len, inputs)), "most of two turns is more than one turn"
    assert stats.cached_prompt_tokens > stats.restored_prompt_tokens > sum(map(len, inputs)) / 2
    assert_idle(engine)


class TieredMachine(EngineMachine):
    """Everything the engine must survive, with tiers that work, are too small, or fail at random."""

    @initialize(
        num_blocks=st.integers(8, 24),
        block_size=st.sampled_from([1, 3, 4]),
        policy=st.sampled_from(["fcfs", "lpm"]),
        write=st.sampled_from(["write_through", "write_back"]),
        depth=st.integers(1, 3),
        is_late=st.booleans(),
        step_tokens=st.integers(1, 40),
        drafts=st.booleans(),
        kind=st.sampled_from(["host", "small", "flaky", "both", "ahead"]),
        ahead=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
        rate=st.sampled_from([0.1, 0.5]),
    )
    def start(  # type: ignore[no-untyped-def,override]
        self, num_blocks, block_size, policy, write, depth, is_late, step_tokens, drafts, kind, ahead, rate
    ) -> None:
        rng = random.Random(num_blocks)

        def draft(tokens: list[int]) -> list[int]:
            return [next_token(tokens)][: rng.randint(0, 1)] + [rng.randrange(VOCAB)] * rng.randint(0, 2)

        def tiers(context: CacheTierContext) -> list[CacheTier]:
            memory = host(7 if kind == "small" else 200)(context)
            flaky: list[CacheTier] = [FlakyTier(context, num_blocks, rate)]
            kinds = {"host": memory, "small": memory, "flaky": flaky, "both": [*memory, *flaky]}
            return (
                [*host(20)(context), FlakyTierReadAhead(context, num_blocks, rate)] if kind == "ahead" else kinds[kind]
            )

        engine = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            cache="hierarchical",
            cache_options={"hicache_write_policy": write, "hicache_storage_prefetch_policy": ahead},
            tiers=Tiered(tiers),
            policy=policy,
            depth=depth,
            is_late=is_late,
            step_tokens=step_tokens,
            max_running=5,
            max_len=64,
            draft=draft if drafts and depth == 1 else None,
        )
        self.engine = scoring(engine)
        self.room = min(64, num_blocks * block_size)
        self.count = 0
        self.open = {}
        self.wanted = {}
        self.ended = set()
        self.paused = set()


TieredMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTieredMachine = TieredMachine.TestCase


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_block_is_copied_once(policy: str) -> None:
    engine, tier = one_tier({"cache_options": {"hicache_write_policy": policy}})
    for turn in range(3):
        for i in range(4):
            serve(engine, f"{turn}-{i}", numbers(i * 20, 40))
    assert len(tier.puts) == len(set(tier.puts)) > 0
    assert engine.stats().restored_prompt_tokens > 0


def test_write_through_keeps_a_block_at_once_and_write_back_when_it_goes() -> None:
    for policy, count in (("write_through", 5), ("write_back", 0)):
        engine, tier = one_tier({"cache_options": {"hicache_write_policy": policy}})
        serve(engine, "a", numbers(0, 20), max_tokens=1)
        assert len(tier.puts) == count
        serve(engine, "b", numbers(50, 60), max_tokens=1)
        assert len(set(tier.puts)) >= 4


def test_the_end_of_a_path_is_kept_before_what_is_above_it() -> None:
    """So a tier that forgets the oldest first forgets ends first: a path without its beginning is of no use."""
    for policy, places in (("write_through", 36), ("write_back", 20)):
        engine = make_engine(
            cache="hierarchical", num_blocks=16, max_len=64, step_tokens=64, chunk_tokens=64,
            tiers=Tiered(host(places)),
            cache_options={"hicache_write_policy": policy},
        )  # fmt: skip
        first = numbers(0, 41)
        serve(engine, "a", first)
        serve(engine, "b", numbers(50, 60))
        serve(engine, "c", numbers(7, 60))
        assert 0 < serve(engine, "again", first) < 40


def test_a_chain_ends_at_the_first_block_that_does_not_come() -> None:
    engine, tier = one_tier()
    serve(engine, "a", numbers(0, 41))
    serve(engine, "b", numbers(50, 60))
    tier.lost.add(sorted(set(tier.puts), key=tier.puts.index)[3])  # saved from the end of each step's share
    restored = serve(engine, "again", numbers(0, 41))
    assert restored % 4 == 0
    assert 0 < restored < 40
    assert_idle(engine)


def test_namespaces_share_nothing() -> None:
    engine, tier = one_tier()
    serve(engine, "a", numbers(0, 41), namespace="mine")
    keys = set(tier.entries)
    serve(engine, "b", numbers(50, 60), namespace="other")
    assert serve(engine, "c", numbers(0, 41), namespace="other") == 0
    assert serve(engine, "d", numbers(0, 41)) == 0
    serve(engine, "e", numbers(50, 60))
    assert serve(engine, "f", numbers(0, 41), namespace="mine") == 40
    assert not keys & {bytes(32)}
    assert all(len(key) == 32 for key in tier.entries)


def test_prompt_logprobs_take_nothing_from_a_tier() -> None:
    """Their tokens are computed, whatever is kept."""
    engine, _ = one_tier()
    serve(engine, "a", numbers(0, 41))
    serve(engine, "b", numbers(50, 60))
    scoring(engine).add(request("c", numbers(0, 41), max_tokens=2, prompt_logprobs=0))
    engine.step()
    assert engine.stats().restored_prompt_tokens == 0
    engine.abort("c")


def test_what_was_dropped_is_not_asked_for_again() -> None:
    engine, _ = one_tier()
    serve(engine, "a", numbers(0, 41))
    serve(engine, "b", numbers(50, 60))
    kv_blocks = engine.scheduler._kv_blocks
    kv_blocks.allocator.free(kv_blocks._cache.drop())
    assert serve(engine, "c", numbers(0, 41)) == 0


def test_restoring_leaves_blocks_for_those_who_run() -> None:
    """What comes back takes no more than what nobody needs now; the rest is computed."""
    engine, _ = one_tier({"max_len": 128, "num_blocks": 20, "step_tokens": 16, "chunk_tokens": 8})
    long = numbers(0, 61)
    serve(engine, "a", long)
    serve(engine, "b", numbers(70, 60))
    engine.add(request("running", numbers(40, 30), max_tokens=20))
    for _ in range(6):
        engine.step()
    engine.add(request("again", long, max_tokens=3))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.preemptions) == (2, 0)
    assert 0 < stats.restored_prompt_tokens < 60
    assert stats.num_free_blocks + stats.num_cached_blocks >= 1
    outputs = run(engine)
    assert outputs["again", 0] == reference(long, 3)
    assert outputs["running", 0][-1] == reference(numbers(40, 30), 20)[-1]
    assert_idle(engine)


def test_a_request_that_cannot_start_asks_no_tier() -> None:
    engine, _ = one_tier({"max_running": 4})
    assert isinstance(engine.executor, FakeExecutor)
    engine.add(request("running", numbers(0, 50), max_tokens=12))
    for _ in range(3):
        engine.step()
    calls: list[str] = []
    inner = engine.executor.worker.call
    engine.executor.worker.call = lambda name, *args: calls.append(name) or inner(name, *args)  # type: ignore[method-assign]
    engine.add(request("waits", numbers(60, 40)))
    for _ in range(5):
        engine.step()
    assert engine.stats().num_waiting == 1
    assert calls == []
    run(engine)


def test_a_siblings_prompt_is_restored_once() -> None:
    engine, tier = one_tier()
    serve(engine, "a", numbers(0, 41))
    serve(engine, "b", numbers(50, 60))
    gets: list[bytes] = []
    inner = tier.get
    tier.get = lambda key, into: gets.append(key) or inner(key, into)  # type: ignore[method-assign]
    engine.add(request("again", numbers(0, 41), max_tokens=3, n=3))
    outputs = run(engine)
    assert all(outputs["again", i] == reference(numbers(0, 41), 3) for i in range(3))
    assert len(gets) == len(set(gets)) == 10


def test_an_entry_counts_only_if_every_worker_has_it() -> None:
    class TwoWorkers(FakeExecutor):
        def __init__(self) -> None: ...

        def call(self, name: str, *args: Any) -> list[Any]:
            return [3, 2] if name == "find_blocks" else [0, 5]

    transfer = WorkerTransfer(TwoWorkers().call)
    assert transfer.find([], [b"k"] * 5) == 2
    assert transfer.load([], [b"k"] * 5, list(range(5))) == 0


def test_auto_never_takes_twice_the_memory() -> None:
    """Where the trie is not installed nothing is kept, and the tiers are for those who ask for them."""
    ranks = {item.name: item.declaration.rank for item in discover().family("cache")}
    assert ranks["hierarchical"] < ranks["none"] < ranks["radix"]


class Copies(BlockTransfer):
    """Remembers what it was to copy."""

    def __init__(self) -> None:
        self.block_ids: list[int] = []

    def find(self, saves: Sequence[tuple[bytes, int]], keys: Sequence[bytes], is_near: bool = False) -> int:
        self.block_ids += [block for _, block in saves]
        return 0

    def load(
        self,
        saves: Sequence[tuple[bytes, int]],
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        is_near: bool = False,
    ) -> int:
        return self.find(saves, keys)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_evicted_blocks_that_others_fill_between_steps_are_copied_at_once_and_not_again(policy: str) -> None:
    """What came from elsewhere was inserted, and evicted before a step: its copy is owed before, not after the step."""
    copies = Copies()
    cache = HierarchicalCache(CacheContext(4, HierarchicalOptions(hicache_write_policy=policy), copies))  # type: ignore[arg-type]
    root = cache.root("")
    cache.lock(root)
    node, taken = cache.insert(root, range(8), [5, 6])
    assert taken == [True, True]
    cache.unlock(node)
    assert sorted(cache.evict(2)) == [5, 6]
    assert copies.block_ids == []
    cache.save_evicted()
    assert sorted(copies.block_ids) == [5, 6]
    cache.save_evicted()
    assert len(copies.block_ids) == 2
    assert cache.take_saves() is None, "others have written there"
