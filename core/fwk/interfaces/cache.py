"""Reuse of K/V between requests, and tiers that keep it outside the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fwk.interfaces.declaration import Declaration


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of some tokens: whole blocks only. ``node`` is the cache's own."""

    node: Any
    block_ids: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CacheContext:
    """What a prefix cache is built with."""

    block_size: int
    options: Any = None


class PrefixCache(ABC):
    """Blocks of finished and running sequences, findable by content.

    The cache owns the blocks it took through ``insert``; the allocator gets them back through ``evict`` or ``drop``
    only. A *node* stands for a path from the root: every block on it stays while any lock is held on it.
    """

    def __init__(self, context: CacheContext) -> None:
        self.context = context

    @abstractmethod
    def match(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix of ``token_ids[:max_tokens]``. Changes nothing.

        The matched blocks may be evicted until ``lock`` is called with the match's node.
        """

    @abstractmethod
    def lock(self, node: Any) -> None:
        """Make the blocks on the path to ``node`` last until as many ``unlock`` calls."""

    @abstractmethod
    def unlock(self, node: Any) -> None:
        """Give one lock back."""

    @abstractmethod
    def insert(self, node: Any, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Any, list[bool]]:
        """Add full blocks after the path ``node``, which the caller has locked.

        ``token_ids`` holds ``block_size`` ids per block. Returns the new path's node, on which the caller's lock now
        is, and for each block whether the cache took it; a block whose content is already cached stays the caller's.
        """

    @abstractmethod
    def evict(self, num_blocks: int) -> list[int]:
        """Forget up to ``num_blocks`` unlocked blocks, the least useful first, and hand them to the caller."""

    @abstractmethod
    def drop(self) -> list[int]:
        """Forget every unlocked block and hand them all to the caller."""

    @abstractmethod
    def root(self, namespace: str) -> Any:
        """The node of the empty path in a namespace (LoRA, salt, ...); nothing is shared between namespaces."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks the cache owns."""

    @property
    @abstractmethod
    def num_evictable_blocks(self) -> int:
        """Blocks ``evict`` could hand out now. Never more than it really could."""


@dataclass(frozen=True, kw_only=True)
class PrefixCacheSpec(Declaration):
    """Declares a prefix cache."""

    family: ClassVar[str] = "cache"


class CacheTier(ABC):
    """A store of K/V blocks by content key. It may fail; a doubt about an entry is a miss."""

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """Whether ``get`` would probably find the entry. Never blocks for long."""

    @abstractmethod
    async def get(self, key: bytes, into: memoryview) -> bool:
        """Copy the entry into ``into``; False when it is not there, damaged, or of another model or shape."""

    @abstractmethod
    async def put(self, key: bytes, data: memoryview) -> bool:
        """Keep a copy; False when there is no room."""

    @abstractmethod
    def close(self) -> None:
        """Finish or give up what is under way, within a second."""


@dataclass(frozen=True, kw_only=True)
class CacheTierSpec(Declaration):
    """Declares a cache tier."""

    family: ClassVar[str] = "cache_tiers"
