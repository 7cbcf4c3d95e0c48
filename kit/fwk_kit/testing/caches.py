"""What prefix caches and cache tiers must do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from fwk.interfaces.prefix_cache import BlockTransfer, CacheContext, CacheTier, CacheTierContext, PrefixCache
from fwk.plugins import Registered
from fwk.plugins.selection import caches_with_tiers
from fwk_kit.testing.base import installed
from fwk_kit.testing.served import ServedSuite

SIZE = 4


class NoTransfer(BlockTransfer):
    """Tiers that never hold anything."""

    def find(self, saves: Sequence[tuple[bytes, int]], keys: Sequence[bytes], is_near: bool = False) -> int:
        return 0

    def load(
        self,
        saves: Sequence[tuple[bytes, int]],
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        is_near: bool = False,
    ) -> int:
        return 0


class _Books:
    """Sequences that come and go over a cache; knows what each block holds, and whose it is."""

    def __init__(self, cache: PrefixCache, rng: random.Random) -> None:
        self.cache = cache
        self.rng = rng
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # of the cache's blocks: namespace, tokens so far
        self.held: list[tuple[Any, str, tuple[int, ...]]] = []  # locked paths: node, namespace, tokens
        self.num_made = 0

    def arrive(self) -> None:
        """A prompt matches what it can, locks it, and inserts the rest."""
        namespace = self.rng.choice(["", "a", "b"])
        tokens = tuple(self.rng.randint(0, 1) for _ in range(SIZE * self.rng.randint(0, 4)))
        most = self.rng.randint(0, len(tokens))
        before = (self.cache.num_blocks, self.cache.num_evictable_blocks)
        match = self.cache.match(namespace, list(tokens), most)
        assert (self.cache.num_blocks, self.cache.num_evictable_blocks) == before, "match() changed something"
        assert match.num_tokens == len(match.block_ids) * SIZE <= most, "match() goes beyond max_tokens"
        for depth, block in enumerate(match.block_ids, 1):
            assert self.content.get(block) == (namespace, tokens[: depth * SIZE]), f"block {block} holds something else"
        self.cache.lock(match.node)
        rest = tokens[match.num_tokens :]
        blocks = list(range(self.num_made, self.num_made + len(rest) // SIZE))
        self.num_made += len(blocks)
        node, taken = self.cache.insert(match.node, list(rest), blocks)
        assert len(taken) == len(blocks)
        for depth, (block, was_taken) in enumerate(zip(blocks, taken, strict=True), match.num_tokens // SIZE + 1):
            if was_taken:
                self.content[block] = (namespace, tokens[: depth * SIZE])
        self.held.append((node, namespace, tokens))

    def leave(self) -> None:
        """A sequence gives its lock back."""
        node, _, _ = self.held.pop(self.rng.randrange(len(self.held)))
        self.cache.unlock(node)

    def evict(self) -> None:
        """Blocks come back: the cache's own, unlocked ones, each once."""
        wanted, promised = self.rng.randint(0, 4), self.cache.num_evictable_blocks
        freed = self.cache.evict(wanted)
        assert min(wanted, promised) <= len(freed) <= wanted, "evict() hands out fewer than it promised, or too many"
        self.give_back(freed)

    def give_back(self, freed: Sequence[int]) -> None:
        assert len(set(freed)) == len(freed)
        for block in freed:
            namespace, tokens = self.content.pop(block)  # KeyError: a block the cache does not own
            for _, other, path in self.held:
                assert not (other == namespace and path[: len(tokens)] == tokens), "a locked block was evicted"


class PrefixCacheSuite(ServedSuite):
    """A random life against plain books: every match is of the right tokens, and every block has one owner."""

    family = "cache"
    interface = PrefixCache

    def cache(self, item: Registered) -> PrefixCache:
        """An empty one; tiers, where it uses them, hold nothing."""
        return self.make(item, CacheContext(SIZE, self.given(item), NoTransfer()))

    def exercise(self, item: Registered) -> None:
        self.test_a_random_life(item)

    def test_a_random_life(self, item: Registered) -> None:
        for seed in range(6):
            rng = random.Random(seed)
            books = _Books(self.cache(item), rng)
            for _ in range(150):
                if books.held and rng.random() < 0.45:
                    books.leave()
                elif rng.random() < 0.3:
                    books.evict()
                else:
                    books.arrive()
                books.cache.take_saves()
                assert books.cache.num_blocks == len(books.content)
                assert books.cache.num_evictable_blocks <= books.cache.num_blocks
            while books.held:
                books.leave()
            assert books.cache.num_evictable_blocks == len(books.content), "an unlocked block cannot be evicted"
            books.give_back(books.cache.drop())
            assert books.content == {}, "drop() keeps blocks that nobody locks"
            assert books.cache.num_blocks == 0

    def test_namespaces_share_nothing(self, item: Registered) -> None:
        cache, tokens = self.cache(item), [1] * (2 * SIZE)
        root = cache.root("one")
        cache.lock(root)
        cache.insert(root, tokens, [5, 6])
        for other in ("", "two", "one\0", "on"):
            assert cache.match(other, tokens, len(tokens)).block_ids == []

    def test_a_lock_that_came_to_nothing_is_given_back(self, item: Registered) -> None:
        cache = self.cache(item)
        root = cache.root("")
        cache.lock(root)
        node, taken = cache.insert(root, [1] * SIZE, [3])
        cache.unlock(node)
        match = cache.match("", [1] * SIZE, SIZE)
        cache.lock(match.node)
        cache.unlock(match.node, is_used=False)
        assert cache.num_evictable_blocks == sum(taken)

    def test_two_engines_do_not_share(self, item: Registered) -> None:
        one, two = self.cache(item), self.cache(item)
        root = one.root("")
        one.lock(root)
        one.insert(root, [1] * SIZE, [3])
        assert two.match("", [1] * SIZE, SIZE).block_ids == []
        assert two.num_blocks == 0


BYTES = 4096
TIER = CacheTierContext(num_blocks=64, block_bytes=BYTES, identity=b"i" * 32)


def key(number: int) -> bytes:
    """32 bytes."""
    return number.to_bytes(4, "little") * 8


def data(number: int) -> memoryview:
    """A block's bytes."""
    return memoryview(random.Random(number).randbytes(BYTES))


class CacheTierSuite(ServedSuite):
    """A store that may forget, and never says anything wrong.

    It is served with the best-ranked prefix cache that uses tiers, unless ``serve_with`` names another.
    """

    family = "cache_tiers"
    interface = CacheTier
    seconds: ClassVar[float] = 20.0

    def selected(self, item: Registered) -> dict[str, Any]:
        return {"cache_tiers": (item.name,), "prefix_cache": caches_with_tiers(installed())[0]}

    def tier_options(self) -> dict[str, object]:
        """The plugin's options, for one test; override it where a store needs a place of its own."""
        return dict(self.options)

    @contextmanager
    def tier(self, item: Registered, context: CacheTierContext = TIER, given: Any = None) -> Iterator[CacheTier]:
        """An open tier, closed at the end within a second or so."""
        model = item.declaration.options
        own = given if given is not None or model is None else model.model_validate(self.tier_options())
        made: CacheTier = self.make(item, replace(context, options=own))
        try:
            yield made
        finally:
            started = time.monotonic()
            made.close()
            assert time.monotonic() - started < 5, "close() takes longer than a second"

    def find(self, tier: CacheTier, number: int, into: memoryview) -> bool:
        """Whether an entry is there soon: slow stores write in a thread of their own."""
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            if tier.get(key(number), into):
                return True
            time.sleep(0.01)
        return False

    def exercise(self, item: Registered) -> None:
        self.test_gives_back_what_it_got(item)

    def test_gives_back_what_it_got(self, item: Registered) -> None:
        with self.tier(item) as tier:
            assert not tier.contains(key(1))
            assert not tier.get(key(1), memoryview(bytearray(BYTES)))
            for number in range(4):
                source = bytearray(data(number))
                assert tier.put(key(number), memoryview(source)) in (True, False)
                source[:] = bytes(BYTES)  # the caller's again
            for number in range(4):
                into = memoryview(bytearray(BYTES))
                assert self.find(tier, number, into), "what was put is not there"
                assert into == data(number), "another block's bytes, or changed ones"
                assert tier.contains(key(number))

    def test_another_thread_reads_ahead(self, item: Registered) -> None:
        """The same entries as ``get`` gives, while this thread continues."""
        with self.tier(item) as tier:
            reader = tier.reader()
            if reader is None:
                pytest.skip(f"{item.name} has no reader: its reader() returns None")
            for number in range(8):
                tier.put(key(number), data(number))
                assert self.find(tier, number, memoryview(bytearray(BYTES)))
            found: list[bytearray | None] = []

            def read() -> None:
                for number in [*range(8), 99]:
                    into = bytearray(BYTES)
                    found.append(into if reader(key(number), memoryview(into)) else None)

            thread = threading.Thread(target=read)
            thread.start()
            while thread.is_alive():
                assert tier.get(key(3), memoryview(bytearray(BYTES)))
                tier.put(key(100), data(100))
            thread.join()
            assert found == [*map(data, range(8)), None]

    def test_the_same_key_again(self, item: Registered) -> None:
        with self.tier(item) as tier:
            for _ in range(3):
                tier.put(key(1), data(1))
            into = memoryview(bytearray(BYTES))
            assert self.find(tier, 1, into)
            assert into == data(1)

    def test_more_than_it_holds(self, item: Registered) -> None:
        """It forgets, and what is left is right."""
        with self.tier(item) as tier:
            for number in range(300):
                tier.put(key(number), data(number))
            for number in range(300):
                into = memoryview(bytearray(BYTES))
                if tier.get(key(number), into):
                    assert into == data(number)

    def test_another_model_finds_nothing(self, item: Registered) -> None:
        """In the same place, under the same options."""
        model = item.declaration.options
        given = model.model_validate(self.tier_options()) if model is not None else None
        with self.tier(item, given=given) as tier:
            tier.put(key(1), data(1))
            assert self.find(tier, 1, memoryview(bytearray(BYTES)))
        with self.tier(item, replace(TIER, identity=b"o" * 32), given) as other:
            assert not other.get(key(1), memoryview(bytearray(BYTES))), "an entry of another model was given out"
