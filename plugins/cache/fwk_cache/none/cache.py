"""The prefix cache that holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fwk.interfaces.prefix_cache import PrefixCache, PrefixMatch


class NoPrefixCache(PrefixCache):
    """Never takes a block, so it never owns one."""

    def match(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        return PrefixMatch(None, [], 0)

    def lock(self, node: Any) -> None:
        pass

    def unlock(self, node: Any, *, is_used: bool = True) -> None:
        pass

    def insert(self, node: Any, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Any, list[bool]]:
        return node, [False] * len(block_ids)

    def evict(self, num_blocks: int) -> list[int]:
        return []

    def drop(self) -> list[int]:
        return []

    def root(self, namespace: str) -> Any:
        return None

    @property
    def num_blocks(self) -> int:
        return 0

    @property
    def num_evictable_blocks(self) -> int:
        return 0
