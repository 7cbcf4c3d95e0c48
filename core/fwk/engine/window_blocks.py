"""Blocks of the layers that see a window only: what a sequence needs of them, and what is kept for the prefix cache.

A model's window layers stand in groups of as many layers as its full ones, each group with a block table of its own
over the same pool (as in vLLM's hybrid KV cache manager). A sequence holds the blocks its next token can see. Blocks
of what the prefix cache holds are kept with its block until room is needed; a prefix can be reused up to any token for
which all blocks of a window are still there.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from fwk.interfaces.prefix_cache import PrefixCache


@dataclass(eq=False, slots=True)
class WindowBlocks:
    """The blocks, one of each window group, of the same ``block_size`` tokens."""

    ids: list[int]
    key: int | None = None  # the prefix cache's block they belong to; None: one sequence's own
    num_users: int = 1
    was_matched: bool = False  # a prefix has ended within a window of here


class WindowCache:
    """The prefix cache, with the window groups' blocks added to its own, as the allocator sees them.

    Evicted first: blocks that lie behind the window of the sequence that wrote them and at which no prefix has ended.
    Then the prefix cache's, with the window blocks that belong to them; then the rest. Each of these is evicted in the
    order of last use.
    """

    def __init__(
        self,
        cache: PrefixCache,
        num_groups: int,
        window: int,
        block_size: int,
        forget_state: Callable[[int], None] | None = None,
    ) -> None:
        """num_groups: of window layers; 0: all layers see everything. window: tokens a token sees, itself included.

        forget_state: called with each block that the prefix cache gives up.
        """
        self._forget_state = forget_state
        self.num_groups = num_groups
        self._cache = cache
        self.window = window
        self._block_size = block_size
        self._by_block: dict[int, WindowBlocks] = {}
        self._passed: dict[int, None] = {}  # keys of unused blocks, the least recently used first
        self._ends: dict[int, None] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that the cache owns."""
        return self._cache.num_blocks + self.num_groups * len(self._by_block)

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that ``evict`` could hand out."""
        return self._cache.num_evictable_blocks + self.num_groups * (len(self._passed) + len(self._ends))

    def evict(self, num_blocks: int) -> list[int]:
        """Forget at least ``num_blocks`` blocks that no sequence uses, as far as there are any."""
        freed: list[int] = []
        while len(freed) < num_blocks and self._passed:
            freed += self._forget(next(iter(self._passed)))
        while len(freed) < num_blocks:
            evicted = self._cache.evict(-(-(num_blocks - len(freed)) // (1 + self.num_groups)))
            if not evicted:
                break
            for block in evicted:
                if self._forget_state is not None:
                    self._forget_state(block)
                freed += [block, *self._forget(block)]
        while len(freed) < num_blocks and self._ends:
            freed += self._forget(next(iter(self._ends)))
        return freed

    def drop(self) -> list[int]:
        """Forget every block that no sequence uses, and hand them all to the caller."""
        freed: list[int] = []
        for block in self._cache.drop():
            if self._forget_state is not None:
                self._forget_state(block)
            freed += [block, *self._forget(block)]
        for key in [*self._passed, *self._ends]:
            freed += self._forget(key)
        return freed

    def _forget(self, key: int) -> list[int]:
        found = self._by_block.pop(key, None)
        self._passed.pop(key, None)
        self._ends.pop(key, None)
        return [] if found is None else found.ids

    def first_needed(self, num_tokens: int) -> int:
        """Of a sequence of ``num_tokens`` computed tokens, the first block the next token's window reaches into."""
        return max(0, num_tokens - self.window + 1) // self._block_size

    def num_usable(self, block_ids: SequenceOf[int]) -> int:
        """How many of a cached prefix's blocks a sequence can continue from: all of a window's blocks are there."""
        best = run = 0
        for count, block in enumerate(block_ids, 1):
            run = run + 1 if block in self._by_block else 0
            if run >= count - self.first_needed(count * self._block_size):
                best = count
        return best

    def take(self, block_ids: SequenceOf[int]) -> list[WindowBlocks | None]:
        """Use what a sequence needs after a prefix of these blocks, all usable; None for those behind its window."""
        first = self.first_needed(len(block_ids) * self._block_size)
        taken: list[WindowBlocks | None] = [None] * first
        for key in block_ids[first:]:
            found = self._by_block[key]
            found.num_users += 1
            found.was_matched = True
            self._passed.pop(key, None)
            self._ends.pop(key, None)
            taken.append(found)
        return taken

    def keep(self, key: int, blocks: WindowBlocks) -> None:
        """Keep a sequence's own blocks with the prefix cache's block ``key``, unless others are kept with it."""
        if blocks.key is None and key not in self._by_block:
            blocks.key = key
            self._by_block[key] = blocks

    def give_back(self, blocks: WindowBlocks, *, is_end: bool) -> list[int]:
        """A sequence needs them no more; returns what is free now. ``is_end``: it ended with them in its window."""
        blocks.num_users -= 1
        if blocks.num_users:
            return []
        if blocks.key is None:
            return blocks.ids
        (self._ends if is_end or blocks.was_matched else self._passed)[blocks.key] = None
        return []
