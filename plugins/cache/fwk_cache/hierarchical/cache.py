"""A trie of blocks on the device in front of tiers that are asked by content."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fwk.interfaces.prefix_cache import BlockTransfer, CacheContext, PrefixCache, PrefixMatch
from fwk.types import BlockSaves
from fwk_cache._common.radix import RadixPrefixCache
from fwk_cache.hierarchical import HierarchicalOptions


@dataclass(frozen=True, slots=True)
class Place:
    """A path: its node in the trie, and the key of its content."""

    node: Any
    key: bytes


class HierarchicalCache(PrefixCache):
    """Keeps the device's blocks in a trie, and copies them to the tiers.

    A block's key is a hash of its tokens and the key of the block before it; the first one's is of the namespace. So a
    key stands for everything the block's K/V depend on, and tells nothing of it.

    Copies are made by the workers, in order with the steps: what is evicted while a step is planned is copied before
    that step runs (or before anything else fills a block), what a planned step fills is copied once it has run. Until
    then nobody else can write to the blocks.
    """

    def __init__(self, context: CacheContext) -> None:
        super().__init__(context)
        assert context.transfer is not None, "a cache with tiers needs a way to them"
        options: HierarchicalOptions = context.options or HierarchicalOptions()
        self._transfer: BlockTransfer = context.transfer
        self._writes_through = options.hicache_write_policy == "write_through"
        policy = options.hicache_storage_prefetch_policy
        self._patience = {"best_effort": 0.0, "wait_complete": math.inf}.get(
            policy, options.hicache_storage_prefetch_timeout
        )
        self._is_near = policy != "wait_complete"
        self._num_tickets = 0
        self._deadlines: dict[int, float] = {}  # by ticket
        self._trie = RadixPrefixCache(context)
        self._key_of: dict[int, bytes] = {}  # of every block in the trie
        self._epoch = b""  # part of every key
        self._before: list[tuple[bytes, int]] = []
        self._after: list[tuple[bytes, int]] = []

    def root(self, namespace: str) -> Place:
        return Place(self._trie.root(namespace), self._root_key(namespace))

    def match(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        match = self._trie.match(namespace, token_ids, max_tokens)
        key = self._key_of[match.block_ids[-1]] if match.block_ids else self._root_key(namespace)
        return PrefixMatch(Place(match.node, key), match.block_ids, match.num_tokens)

    def lock(self, node: Place) -> None:
        self._trie.lock(node.node)

    def unlock(self, node: Place, *, is_used: bool = True) -> None:
        self._trie.unlock(node.node, is_used=is_used)

    def insert(self, node: Place, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Place, list[bool]]:
        keys = self._keys(node, token_ids)
        place, taken = self._insert(node, token_ids, block_ids, keys)
        if self._writes_through:
            # From the end, as eviction does: what a tier got last it forgets last.
            self._after += reversed(_only(zip(keys, block_ids, strict=True), taken))
        return place, taken

    def evict(self, num_blocks: int) -> list[int]:
        block_ids = self._trie.evict(num_blocks)
        evicted = {block: self._key_of.pop(block) for block in block_ids}
        self._after = [pair for pair in self._after if pair[1] not in evicted]  # it is whole: no step fills it
        self._before += [(key, block) for block, key in evicted.items()]
        return block_ids

    def drop(self) -> list[int]:
        block_ids = self._trie.drop()
        for block in block_ids:
            del self._key_of[block]
        self._before.clear()  # copies not made yet: the caller may write to the blocks
        self._after.clear()
        self._epoch = secrets.token_bytes(32)  # what the tiers hold is never asked for again
        return block_ids

    def restorable(self, node: Place, token_ids: Sequence[int]) -> int:
        keys = self._keys(node, token_ids)
        if not keys:
            return 0
        return self._transfer.find(self._take_before(), keys, self._is_near)

    def restore(self, node: Place, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Place, list[bool]]:
        keys = self._keys(node, token_ids)
        count = self._transfer.load(self._take_before(), keys, block_ids, self._is_near)
        tokens = token_ids[: count * self.context.block_size]
        return self._insert(node, tokens, block_ids[:count], keys[:count])

    def prepare(self, namespace: str, token_ids: Sequence[int]) -> int | None:
        if not self._transfer.can_prefetch:
            return None
        match = self.match(namespace, token_ids, len(token_ids))
        keys = self._keys(match.node, token_ids[match.num_tokens :])
        self._num_tickets += 1
        if not keys or not self._transfer.prefetch(self._num_tickets, keys):
            return None
        self._deadlines[self._num_tickets] = time.monotonic() + self._patience
        return self._num_tickets

    def are_prepared(self, tickets: Sequence[int]) -> list[bool]:
        now = time.monotonic()
        late = [now >= self._deadlines[ticket] for ticket in tickets]
        if all(late):
            return late
        return [any(each) for each in zip(late, self._transfer.prefetched(tickets), strict=True)]

    def leave(self, ticket: int) -> None:
        del self._deadlines[ticket]
        self._transfer.end_prefetch(ticket)

    def save_evicted(self) -> None:
        if self._before:
            self._transfer.find(self._take_before(), [])

    def take_saves(self) -> BlockSaves | None:
        if not self._before and not self._after:
            return None
        after, self._after = self._after, []
        return BlockSaves(self._take_before(), after)

    @property
    def num_blocks(self) -> int:
        return self._trie.num_blocks

    @property
    def num_evictable_blocks(self) -> int:
        return self._trie.num_evictable_blocks

    def _insert(
        self, node: Place, token_ids: Sequence[int], block_ids: Sequence[int], keys: list[bytes]
    ) -> tuple[Place, list[bool]]:
        inner, taken = self._trie.insert(node.node, token_ids, block_ids)
        self._key_of.update((block, key) for key, block in _only(zip(keys, block_ids, strict=True), taken))
        return Place(inner, keys[-1] if keys else node.key), taken

    def _keys(self, node: Place, token_ids: Sequence[int]) -> list[bytes]:
        """The key of each full block of ``token_ids``, which follow the path ``node``."""
        data = memoryview(array("i", token_ids)).cast("B")
        size = self.context.block_size * array("i").itemsize
        keys: list[bytes] = []
        key = node.key
        for start in range(0, len(data) - size + 1, size):
            key = hashlib.blake2b(data[start : start + size], key=key, digest_size=32).digest()
            keys.append(key)
        return keys

    def _root_key(self, namespace: str) -> bytes:
        return hashlib.blake2b(namespace.encode(), key=self._epoch, digest_size=32, person=b"fwk namespace").digest()

    def _take_before(self) -> list[tuple[bytes, int]]:
        before, self._before = self._before, []
        return before


def _only(pairs: Iterable[tuple[bytes, int]], taken: list[bool]) -> list[tuple[bytes, int]]:
    return [pair for pair, was_taken in zip(pairs, taken, strict=True) if was_taken]
