"""Blocks no running sequence has: being filled for a waiting one, or kept for another server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fwk.engine.blocks import BlockAllocator
from fwk.interfaces.prefix_cache import PrefixCache, PrefixMatch


@dataclass(eq=False, slots=True)
class ReservedBlocks:
    """Blocks for ``token_ids``, which follow the locked path ``node`` of the prefix cache."""

    node: Any
    block_ids: list[int]
    token_ids: list[int]


class Reservations:
    """Takes blocks from the allocator, and gives them back, or to the prefix cache."""

    def __init__(self, allocator: BlockAllocator, cache: PrefixCache, block_size: int) -> None:
        self._allocator = allocator
        self._cache = cache
        self._block_size = block_size
        self._open: list[ReservedBlocks] = []

    @property
    def block_ids(self) -> list[int]:
        """All that are reserved; they have no other owner."""
        return [block for reserved in self._open for block in reserved.block_ids]

    def reserve(
        self, match: PrefixMatch, token_ids: Sequence[int], count: int, num_spare: int = 0
    ) -> ReservedBlocks | None:
        """Take ``count`` blocks for the tokens after what matched; None where ``num_spare`` more would not be left."""
        self._cache.lock(match.node)  # first: what matched is no room for what follows it
        if count + num_spare > self._allocator.num_available:
            self._cache.unlock(match.node, is_used=False)
            return None
        blocks = self._allocator.allocate(count)
        tokens = list(token_ids[match.num_tokens : match.num_tokens + count * self._block_size])
        self._open.append(ReservedBlocks(match.node, blocks, tokens))
        return self._open[-1]

    def settle(self, reserved: ReservedBlocks, *, has_arrived: bool) -> None:
        """Give reserved blocks to the prefix cache, if their K/V have arrived, else back."""
        self._open.remove(reserved)
        node, taken = reserved.node, [False] * len(reserved.block_ids)
        if has_arrived:
            node, taken = self._cache.insert(node, reserved.token_ids, reserved.block_ids)
        self._cache.unlock(node, is_used=has_arrived)
        self._allocator.free(b for b, was_taken in zip(reserved.block_ids, taken, strict=True) if not was_taken)

    def hold(self, node: Any) -> None:
        """Keep a path of the prefix cache until ``let_go``, whatever becomes of the sequence that has it."""
        self._cache.lock(node)

    def let_go(self, node: Any) -> None:
        """Keep it no longer than anything else in the cache."""
        self._cache.unlock(node)
