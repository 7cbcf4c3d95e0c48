"""The free list of the KV cache. One owner of blocks at any time: the allocator, a sequence, or the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from fwk.engine.window_blocks import WindowCache


class OutOfBlocks(Exception):
    """More blocks were asked for than could be freed without pre-empting somebody."""


class BlockAllocator:
    """Hands out block ids, taking them back from the prefix cache when the free list is empty.

    Blocks freed last are handed out first: memory that was never used stays untouched.
    """

    def __init__(self, num_blocks: int, cache: WindowCache) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Free blocks: those without an owner."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        return len(self._free) + self._cache.num_evictable_blocks

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, or ``OutOfBlocks`` with nothing changed but the cache's size."""
        missing = count - len(self._free)
        if missing > 0:
            if missing > self._cache.num_evictable_blocks:
                raise OutOfBlocks
            self._free.extend(self._cache.evict(missing))
            if count > len(self._free):
                raise OutOfBlocks
        return [self._free.pop() for _ in range(count)]

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back from their owner."""
        self._free.extend(block_ids)

    def check(self, owned: list[int]) -> None:
        """Prove that every block has one owner; ``owned`` are those of sequences. For tests and ``--check-blocks``."""
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a block is twice in the free list")
        if len(set(owned)) != len(owned):
            raise AssertionError("a block belongs to two sequences")
        if set(owned) & set(self._free):
            raise AssertionError("a sequence's block is in the free list")
        total = len(self._free) + len(owned) + self._cache.num_blocks
        if total != self.num_blocks:
            raise AssertionError(
                f"blocks do not balance: {len(self._free)} free + {len(owned)} of sequences + "
                f"{self._cache.num_blocks} of the cache != {self.num_blocks}"
            )
