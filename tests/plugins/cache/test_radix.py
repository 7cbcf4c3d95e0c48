"""The radix prefix cache against a naive model, and its promises one by one."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fwk.interfaces.prefix_cache import CacheContext
from fwk_cache._common.options import EvictionOptions
from fwk_cache._common.radix import RadixPrefixCache
from fwk_cache.none.cache import NoPrefixCache

SIZE = 2
Path = tuple[str, tuple[tuple[int, ...], ...]]  # namespace, blocks from the root


def make(size: int = SIZE, policy: str = "lru") -> RadixPrefixCache:
    options = EvictionOptions(radix_eviction_policy=policy)  # type: ignore[arg-type]
    return RadixPrefixCache(CacheContext(block_size=size, options=options))


def add(cache: RadixPrefixCache, namespace: str, tokens: list[int], block_ids: list[int]) -> tuple[object, list[bool]]:
    """Insert a whole prompt and keep it locked."""
    root = cache.root(namespace)
    cache.lock(root)
    return cache.insert(root, tokens, block_ids)


class NaiveCache:
    """The same promises, spelled out over a flat dict of paths: no trie, no order kept, everything searched."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.uses: Counter[Path] = Counter()
        self.blocks: dict[Path, int] = {}
        self.locks: Counter[Path] = Counter()
        self.release: dict[Path, int] = {}
        self.clock = 0

    def prefixes(self, path: Path) -> list[Path]:
        return [(path[0], path[1][:n]) for n in range(len(path[1]), 0, -1)]

    def is_locked(self, path: Path) -> bool:
        return any(
            count > 0 and other[0] == path[0] and other[1][: len(path[1])] == path[1]
            for other, count in self.locks.items()
        )

    def lock(self, path: Path) -> None:
        self.locks[path] += 1
        self.uses.update(self.prefixes(path))

    def worth(self, path: Path) -> tuple[int, int]:
        return (self.uses[path] if self.policy == "lfu" else 0), self.release[path]

    def unlock(self, path: Path, is_used: bool) -> None:
        self.locks[path] -= 1
        if not is_used:
            self.uses.subtract(self.prefixes(path))
        for prefix in self.prefixes(path):
            if not self.is_locked(prefix):
                self.clock += 1
                self.release[prefix] = self.clock

    def evict(self, num_blocks: int) -> list[int]:
        out: list[int] = []
        while len(out) < num_blocks:
            parents = {(path[0], path[1][:-1]) for path in self.blocks}
            leaves = [path for path in self.blocks if path not in parents and not self.is_locked(path)]
            if not leaves:
                break
            path = min(leaves, key=self.worth)
            out.append(self.blocks.pop(path))
            del self.uses[path]
        return out


class RadixMachine(RuleBasedStateMachine):
    """Sequences come, grow and go; blocks are evicted; the cache and the model must agree at every turn."""

    policy = "lru"
    tokens = st.lists(st.integers(0, 2), max_size=9)
    namespaces = st.sampled_from(["", "a", "a\0b"])

    def __init__(self) -> None:
        super().__init__()
        self.cache = make(policy=self.policy)
        self.model = NaiveCache(self.policy)
        self.next_block = 0
        self.held: list[tuple[object, Path]] = []  # node and path of each lock

    def model_match(self, namespace: str, tokens: list[int], max_tokens: int) -> Path:
        blocks: tuple[tuple[int, ...], ...] = ()
        usable = tokens[:max_tokens]
        while len(usable) >= SIZE:
            longer = (*blocks, tuple(usable[:SIZE]))
            if (namespace, longer) not in self.model.blocks:
                break
            blocks, usable = longer, usable[SIZE:]
        return namespace, blocks

    @rule(namespace=namespaces, tokens=tokens, max_tokens=st.integers(-1, 10), lock=st.booleans())
    def match(self, namespace: str, tokens: list[int], max_tokens: int, lock: bool) -> None:
        expected = self.model_match(namespace, tokens, max(max_tokens, 0))
        found = self.cache.match(namespace, tokens, max_tokens)
        assert found.block_ids == [self.model.blocks[p] for p in reversed(self.model.prefixes(expected))]
        assert found.num_tokens == len(expected[1]) * SIZE
        if lock:
            self.cache.lock(found.node)
            self.model.lock(expected)
            self.held.append((found.node, expected))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=tokens)
    def insert(self, data: st.DataObject, tokens: list[int]) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        node, path = self.held[at]
        num_blocks = len(tokens) // SIZE
        ids = list(range(self.next_block, self.next_block + num_blocks))
        self.next_block += num_blocks
        new, taken = self.cache.insert(node, tokens[: num_blocks * SIZE], ids)
        blocks = tuple(tuple(tokens[i * SIZE : (i + 1) * SIZE]) for i in range(num_blocks))
        longer = (path[0], path[1] + blocks)
        for depth, (block_id, was_taken) in enumerate(zip(ids, taken, strict=True), len(path[1]) + 1):
            prefix = (path[0], longer[1][:depth])
            assert was_taken == (prefix not in self.model.blocks)
            self.model.blocks.setdefault(prefix, block_id)
            self.model.uses[prefix] += 1
        self.model.locks[path] -= 1
        self.model.locks[longer] += 1
        self.held[at] = (new, longer)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def relock(self, data: st.DataObject) -> None:
        node, path = data.draw(st.sampled_from(self.held))
        self.cache.lock(node)
        self.model.lock(path)
        self.held.append((node, path))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_used=st.booleans())
    def unlock(self, data: st.DataObject, is_used: bool) -> None:
        node, path = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.unlock(node, is_used=is_used)
        self.model.unlock(path, is_used)

    @rule(num_blocks=st.integers(0, 5))
    def evict(self, num_blocks: int) -> None:
        could = self.cache.num_evictable_blocks
        evicted = self.cache.evict(num_blocks)
        assert len(evicted) == min(num_blocks, could)
        assert evicted == self.model.evict(num_blocks)

    @rule()
    def drop(self) -> None:
        assert self.cache.drop() == self.model.evict(10**9)
        assert self.cache.num_evictable_blocks == 0

    @invariant()
    def counts_are_true(self) -> None:
        assert self.cache.num_blocks == len(self.model.blocks)
        evictable = [path for path in self.model.blocks if not self.model.is_locked(path)]
        assert self.cache.num_evictable_blocks == len(evictable)

    @invariant()
    def locked_paths_are_whole(self) -> None:
        for _, path in self.held:
            assert all(prefix in self.model.blocks for prefix in self.model.prefixes(path))
            tokens = [token for block in path[1] for token in block]
            assert self.cache.match(path[0], tokens, len(tokens)).num_tokens == len(tokens)


class LfuMachine(RadixMachine):
    """The same promises, other blocks first."""

    policy = "lfu"


RadixMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
LfuMachine.TestCase.settings = RadixMachine.TestCase.settings
TestRadixMachine = RadixMachine.TestCase
TestLfuMachine = LfuMachine.TestCase


def test_lfu_keeps_what_is_used_often_and_lru_what_was_used_last() -> None:
    for policy, first in (("lru", 0), ("lfu", 1)):
        cache = make(policy=policy)
        for i in range(2):
            cache.unlock(add(cache, "", [i, i], [i])[0])
        for used in (0, 0, 0, 1):
            match = cache.match("", [used, used], 2)
            cache.lock(match.node)
            cache.unlock(match.node)
        assert cache.evict(1) == [first]


def test_a_lock_that_comes_to_nothing_is_no_use() -> None:
    """A request at the head of a full queue is looked up in every step; that does not make its prefix popular."""
    cache = make(policy="lfu")
    for i in range(2):
        cache.unlock(add(cache, "", [i, i], [i])[0])
    for _ in range(5):
        match = cache.match("", [0, 0], 2)
        cache.lock(match.node)
        cache.unlock(match.node, is_used=False)
    used = cache.match("", [1, 1], 2)
    cache.lock(used.node)
    cache.unlock(used.node)
    assert cache.evict(1) == [0]


def test_a_path_goes_from_its_end_and_the_oldest_path_first() -> None:
    cache = make()
    old, _ = add(cache, "", [1, 1, 2, 2, 3, 3], [10, 11, 12])
    new, _ = add(cache, "", [1, 1, 9, 9], [20, 21])
    cache.unlock(old)
    cache.unlock(new)
    assert cache.evict(2) == [12, 11]
    assert cache.evict(9) == [21, 10]


def test_a_lock_refreshes_but_a_match_does_not() -> None:
    cache = make()
    for i in range(3):
        node, _ = add(cache, "", [i, i], [i])
        cache.unlock(node)
    cache.match("", [0, 0], 2)
    touched = cache.match("", [1, 1], 2).node
    cache.lock(touched)
    cache.unlock(touched)
    assert cache.evict(3) == [0, 2, 1]


def test_a_duplicate_stays_the_callers_and_the_lock_still_moves() -> None:
    cache = make()
    first, taken = add(cache, "", [1, 2, 3, 4], [7, 8])
    assert taken == [True, True]
    second, taken = add(cache, "", [1, 2, 3, 4, 5, 6], [17, 18, 19])
    assert taken == [False, False, True]
    assert cache.match("", [1, 2, 3, 4, 5, 6], 6).block_ids == [7, 8, 19]
    cache.unlock(first)
    assert cache.evict(9) == []
    cache.unlock(second)
    assert cache.evict(9) == [19, 8, 7]


def test_the_last_incomplete_block_and_tokens_past_the_limit_do_not_match() -> None:
    cache = make(4)
    add(cache, "", list(range(8)), [1, 2])
    assert cache.match("", list(range(8)), 7).block_ids == [1]
    assert cache.match("", [0, 1, 2, 3, 4, 5, 6], 100).block_ids == [1]
    assert cache.match("", [0, 1, 2], 3).num_tokens == 0


def test_namespaces_share_nothing_and_empty_ones_are_forgotten() -> None:
    cache = make()
    node, _ = add(cache, "salt", [1, 2], [5])
    assert cache.match("", [1, 2], 2).block_ids == []
    assert cache.match("salt", [1, 2], 2).block_ids == [5]
    cache.unlock(node)
    del node
    cache.drop()
    for i in range(1000):
        cache.match(f"user {i}", [1, 2], 2)
    assert len(cache._roots) == 0


def test_two_matches_of_an_unknown_namespace_meet_at_one_root() -> None:
    cache = make()
    first, second = cache.match("new", [1, 2], 2).node, cache.match("new", [1, 2], 2).node
    cache.lock(first)
    cache.lock(second)
    assert cache.insert(first, [1, 2], [3])[1] == [True]
    assert cache.insert(second, [1, 2], [4])[1] == [False]


def test_misuse_is_noticed() -> None:
    cache = make()
    node, _ = add(cache, "", [1, 2], [3])
    cache.unlock(node)
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(node)
    cache = make()
    node, _ = add(cache, "", [1, 2], [3])
    cache.unlock(node)
    with pytest.raises(AssertionError, match="not locked"):
        cache.insert(node, [3, 4], [4])
    cache.evict(1)
    with pytest.raises(AssertionError, match="evicted"):
        cache.lock(node)


def test_token_ids_that_differ_only_in_high_bits_are_different() -> None:
    cache = make()
    add(cache, "", [1, 2**24 + 1], [3])
    assert cache.match("", [1, 1], 2).block_ids == []
    assert cache.match("", [1, 2**24 + 1], 2).block_ids == [3]


def _cycle_seconds(num_prefixes: int, policy: str) -> float:
    """Best time of one match, lock, insert, unlock and evict in a cache of that many prefixes."""
    cache = make(4, policy)
    for i in range(num_prefixes):
        node, _ = add(cache, f"{i % 100}", [i, i, i, i], [i])
        cache.unlock(node)
    rng = random.Random(0)
    best = 1.0
    gc.disable()
    try:
        for i in range(300):
            tokens = [rng.randrange(num_prefixes)] * 4
            started = time.perf_counter()
            match = cache.match("7", tokens + [num_prefixes + i] * 4, 8)
            cache.lock(match.node)
            rest = [*tokens, *[num_prefixes + i] * 4][match.num_tokens :]
            node, _ = cache.insert(match.node, rest, list(range(len(rest) // 4)))
            cache.unlock(node)
            cache.evict(len(rest) // 4)
            best = min(best, time.perf_counter() - started)
    finally:
        gc.enable()
    return best


@pytest.mark.gate(1)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_cost_does_not_grow_with_the_cache(policy: str) -> None:
    assert _cycle_seconds(100_000, policy) < 10 * _cycle_seconds(100, policy)


def test_none_takes_nothing() -> None:
    cache = NoPrefixCache(CacheContext(block_size=2))
    match = cache.match("", [1, 2], 2)
    assert (match.block_ids, match.num_tokens) == ([], 0)
    cache.lock(match.node)
    node, taken = cache.insert(match.node, [1, 2], [9])
    assert taken == [False]
    cache.unlock(node)
    assert (cache.evict(5), cache.drop(), cache.num_blocks, cache.num_evictable_blocks) == ([], [], 0, 0)
