"""A trie whose edges are whole blocks of tokens."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from fwk.interfaces.prefix_cache import CacheContext, PrefixCache, PrefixMatch
from fwk_cache._common.events import EventPublisher, block_hash, read_config
from fwk_cache._common.eviction import ORDERS
from fwk_cache._common.options import EvictionOptions

_EVICTED = -1


class Node:
    """One block below its parent's path; a root stands for the empty path and has no block.

    num_locks: locks whose path goes through this node, so a node without any has no locked descendant.
    num_uses: locks there have ever been, less those that came to nothing; never more than the parent's.
    event_hash: what K/V events call it; None where none are published of it.
    """

    __slots__ = ("__weakref__", "block_id", "children", "event_hash", "key", "num_locks", "num_uses", "parent")

    def __init__(self, parent: Node | None, key: bytes, block_id: int) -> None:
        self.parent = parent
        self.key = key
        self.block_id = block_id
        self.children: dict[bytes, Node] = {}
        self.num_locks = 0
        self.num_uses = 0
        self.event_hash: int | None = None


class RadixPrefixCache(PrefixCache):
    """Eviction without searching, however many blocks are cached.

    ``_unlocked`` holds the nodes without locks. A path is let go from its end to its root, and whatever uses a node
    uses those above it, so in either order (see ``eviction``) an unlocked child stands before its parent and the first
    node is always a leaf. Locking is what counts as use.

    Edges are keyed by the tokens themselves, never by a hash alone. They are bytes because the hash of bytes is
    seeded per process: nobody can craft prompts that collide.

    A root lives as long as somebody holds it, be it a caller or a block below it; then its namespace is forgotten.
    """

    def __init__(self, context: CacheContext) -> None:
        super().__init__(context)
        self._block_size = context.block_size
        self._roots: WeakValueDictionary[str, Node] = WeakValueDictionary()
        options: EvictionOptions = context.options or EvictionOptions()
        self._unlocked = ORDERS[options.radix_eviction_policy]()
        self._num_blocks = 0
        self._events = _publisher(options)
        if self._events is not None:
            weakref.finalize(self, self._events.close)

    def root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", _EVICTED)
        return root

    def match(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        size = self._block_size
        node = self.root(namespace)
        block_ids: list[int] = []
        for start in range(0, min(len(token_ids), max_tokens) - size + 1, size):
            child = node.children.get(_key(token_ids[start : start + size]))
            if child is None:
                break
            node = child
            block_ids.append(child.block_id)
        return PrefixMatch(node, block_ids, len(block_ids) * size)

    def lock(self, node: Any) -> None:
        # Leaves go first, so a node that is still here has its whole path.
        assert node.parent is None or node.block_id != _EVICTED, "locked a match after its blocks were evicted"
        while node.parent is not None:
            if node.num_locks == 0:
                self._unlocked.remove(node)
            node.num_locks += 1
            node.num_uses += 1
            node = node.parent

    def unlock(self, node: Any, *, is_used: bool = True) -> None:
        while node.parent is not None:
            assert node.num_locks > 0, "unlocked more often than locked"
            node.num_locks -= 1
            node.num_uses -= not is_used
            if node.num_locks == 0:
                self._unlocked.add(node)
            node = node.parent

    def insert(self, node: Any, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Any, list[bool]]:
        size = self._block_size
        assert len(token_ids) == len(block_ids) * size, "only full blocks can be cached"
        assert node.parent is None or node.num_locks > 0, "inserted after a path that is not locked"
        taken: list[bool] = []
        before = node
        for i, block_id in enumerate(block_ids):
            key = _key(token_ids[i * size : (i + 1) * size])
            child = node.children.get(key)
            taken.append(child is None)
            if child is None:
                child = node.children[key] = Node(node, key, block_id)
                self._num_blocks += 1
            elif child.num_locks == 0:
                self._unlocked.remove(child)
            child.num_locks += 1  # the caller's lock, which already covers the path above, moves down
            child.num_uses += 1
            node = child
        if self._events is not None and any(taken):
            self._tell_stored(self._events, before, node, taken, token_ids)
        return node, taken

    def evict(self, num_blocks: int) -> list[int]:
        block_ids: list[int] = []
        gone: list[int] = []
        for _ in range(min(num_blocks, len(self._unlocked))):
            node = self._unlocked.pop()
            assert node.parent is not None
            del node.parent.children[node.key]
            block_ids.append(node.block_id)
            node.block_id = _EVICTED
            if node.event_hash is not None:
                gone.append(node.event_hash)
        if self._events is not None and gone:
            self._events.removed(gone)
        self._num_blocks -= len(block_ids)
        return block_ids

    def _tell_stored(
        self, events: EventPublisher, before: Node, last: Node, taken: list[bool], token_ids: Sequence[int]
    ) -> None:
        """Tell of new blocks on the path from ``before`` to ``last``: no block after a new one was there already.

        Blocks of a namespace are not told: a router could not tell an adapter's or a salted prompt's from others.
        """
        path = [last]
        while path[-1].parent is not before:
            assert path[-1].parent is not None
            path.append(path[-1].parent)
        path.reverse()
        if (before.parent is None and before is not self._roots.get("")) or (
            before.parent and before.event_hash is None
        ):
            return
        first = taken.index(True)
        parent = parent_hash = path[first - 1].event_hash if first else before.event_hash
        for node in path[first:]:
            node.event_hash = parent = block_hash(parent, node.key)
        hashes = [node.event_hash for node in path[first:] if node.event_hash is not None]
        events.stored(hashes, parent_hash, token_ids[first * self._block_size :], self._block_size)

    def drop(self) -> list[int]:
        return self.evict(len(self._unlocked))

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_evictable_blocks(self) -> int:
        return len(self._unlocked)


def _publisher(options: EvictionOptions) -> EventPublisher | None:
    if options.kv_events_config is None:
        return None
    config = read_config(options.kv_events_config)
    return EventPublisher(config) if config.enable_kv_cache_events else None


def _key(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
