"""In which order unlocked blocks are evicted.

Every order must hand out a block before the block above it, so that what is evicted is always the end of a path. Both
orders here do so without looking at the tree, because the trie promises two things: of a path whose locks end together
the end is added before what is above it, and no block was used more often than the one above it.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fwk_cache._common.radix import Node


class EvictionOrder(ABC):
    """The unlocked blocks. A block's ``num_uses`` does not change while it is among them."""

    @abstractmethod
    def add(self, block: Node) -> None:
        """A block lost its last lock."""

    @abstractmethod
    def remove(self, block: Node) -> None:
        """A block was locked."""

    @abstractmethod
    def pop(self) -> Node:
        """Take the least useful block out."""

    @abstractmethod
    def __len__(self) -> int: ...


class LeastRecentlyUsed(EvictionOrder):
    """Those whose last lock ended first go first; constant time."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Node, None] = OrderedDict()

    def add(self, block: Node) -> None:
        self._blocks[block] = None

    def remove(self, block: Node) -> None:
        del self._blocks[block]

    def pop(self) -> Node:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)


class LeastFrequentlyUsed(EvictionOrder):
    """Those used least often go first, among equals the least recently used.

    One least-recently-used order for each number of uses; ``_counts`` is a heap of the numbers that have one.
    """

    def __init__(self) -> None:
        self._by_count: dict[int, OrderedDict[Node, None]] = {}
        self._counts: list[int] = []
        self._len = 0

    def add(self, block: Node) -> None:
        blocks = self._by_count.get(block.num_uses)
        if blocks is None:
            blocks = self._by_count[block.num_uses] = OrderedDict()
            heapq.heappush(self._counts, block.num_uses)
        blocks[block] = None
        self._len += 1

    def remove(self, block: Node) -> None:
        del self._by_count[block.num_uses][block]
        self._len -= 1

    def pop(self) -> Node:
        while not (blocks := self._by_count[self._counts[0]]):
            del self._by_count[heapq.heappop(self._counts)]
        self._len -= 1
        return blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return self._len


ORDERS: dict[str, type[EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
}
