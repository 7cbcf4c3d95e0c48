"""Blocks no running sequence has: being filled for a waiting one, or kept after one has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fwk.engine.blocks import BlockAllocator
from fwk.engine.sequence import Sequence as EngineSequence
from fwk.interfaces.feature import Blocks, FeatureSequence, HeldBlocks, ReservedBlocks
from fwk.interfaces.prefix_cache import PrefixCache, PrefixMatch


class Reservations(Blocks):
    """Takes blocks from the allocator, and gives them back, or to the prefix cache."""

    def __init__(
        self,
        allocator: BlockAllocator,
        cache: PrefixCache,
        block_size: int,
        match: Callable[[EngineSequence], PrefixMatch],
        drop: Callable[[], None],
    ) -> None:
        self._match = match
        self.drop = drop
        self._allocator = allocator
        self._cache = cache
        self._block_size = block_size
        self._open: list[ReservedBlocks] = []
        self.num_locks = 0
        """On paths of the prefix cache."""

    @property
    def block_ids(self) -> list[int]:
        """All that are reserved; they have no other owner."""
        return [block for reserved in self._open for block in reserved.block_ids]

    def match(self, sequence: FeatureSequence) -> PrefixMatch:
        assert isinstance(sequence, EngineSequence)
        return self._match(sequence)

    def reserve(
        self, match: PrefixMatch, token_ids: Sequence[int], count: int, num_spare: int = 0
    ) -> ReservedBlocks | None:
        self._cache.lock(match.node)  # first: what matched is no room for what follows it
        if count + num_spare > self._allocator.num_available:
            self._cache.unlock(match.node, is_used=False)
            return None
        blocks = self._allocator.allocate(count)
        self._cache.save_evicted()
        tokens = list(token_ids[match.num_tokens : match.num_tokens + count * self._block_size])
        self._open.append(ReservedBlocks(match.node, blocks, tokens))
        self.num_locks += 1
        return self._open[-1]

    def settle(self, reserved: ReservedBlocks, *, has_arrived: bool) -> None:
        self._open.remove(reserved)
        self.num_locks -= 1
        node, taken = reserved.node, [False] * len(reserved.block_ids)
        if has_arrived:
            node, taken = self._cache.insert(node, reserved.token_ids, reserved.block_ids)
        self._cache.unlock(node, is_used=has_arrived)
        self._allocator.free(b for b, was_taken in zip(reserved.block_ids, taken, strict=True) if not was_taken)

    def hold(self, sequence: FeatureSequence, num_tokens: int) -> HeldBlocks | None:
        assert isinstance(sequence, EngineSequence)
        blocks = sequence.blocks[: min(num_tokens // self._block_size, sequence.num_shared_blocks)]
        if not blocks:
            return None
        self._cache.lock(sequence.node)
        self.num_locks += 1
        return HeldBlocks(sequence.node, blocks)

    def let_go(self, held: HeldBlocks) -> None:
        self._cache.unlock(held.node)
        self.num_locks -= 1
