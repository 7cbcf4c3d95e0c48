"""Reuse of K/V between requests, and tiers that keep it outside the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fwk.interfaces.declaration import Declaration
from fwk.types import BlockSaves


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of some tokens: whole blocks only. ``node`` is the cache's own.

    - ``block_ids``: in the order of the tokens.
    - ``num_tokens``: that matched: a multiple of the block size.
    """

    node: Any
    block_ids: list[int]
    num_tokens: int


class BlockTransfer(ABC):
    """Reaches the cache tiers, which live with the workers. A feature supplies it (``FeatureSpec.transfer``).

    A key names a block's content: the tokens of the block, everything before them, and the namespace. Which model,
    precision and rank it is of is the workers' business. ``saves`` are copies to make before anything else.
    ``is_near``: leave out tiers that can be read ahead, so that no step waits for them.
    """

    @abstractmethod
    def find(self, saves: Sequence[tuple[bytes, int]], keys: Sequence[bytes], is_near: bool = False) -> int:
        """How many of ``keys``, from the first on, a tier of every worker probably has."""

    @abstractmethod
    def load(
        self,
        saves: Sequence[tuple[bytes, int]],
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        is_near: bool = False,
    ) -> int:
        """Copy what the tiers hold of ``keys`` into blocks that no launched step touches.

        Returns how many, from the first on, every worker has in place now. The content of the others is undefined.
        """

    @property
    def can_prefetch(self) -> bool:
        """Whether the workers have tiers that can be read ahead, and a faster one that keeps what was read."""
        return False

    def prefetch(self, number: int, keys: Sequence[bytes]) -> bool:
        """Begin to read ``keys``, of one path, into the fastest tier; False: there is nothing to be read."""
        return False

    def prefetched(self, numbers: Sequence[int]) -> list[bool]:
        """Of each ``prefetch``, whether it has ended in every worker. Ended, it may have found nothing."""
        return [True] * len(numbers)

    def end_prefetch(self, number: int) -> None:
        """Read no more of one; what has been read stays."""


@dataclass(frozen=True, slots=True)
class CacheContext:
    """What a prefix cache is built with. ``transfer`` is there for a cache whose declaration has ``tiers``.

    - ``block_size``: tokens in a block.
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    block_size: int
    options: Any = None
    transfer: BlockTransfer | None = None


class PrefixCache(ABC):
    """Blocks of finished and running sequences, findable by content.

    The cache owns the blocks it took through ``insert``; the allocator gets them back through ``evict`` or ``drop``
    only. A *node* stands for a path from the root: every block on it stays while any lock is held on it.

    One that raises, or answers what cannot be, is left out: from then on prompts are computed in full.
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
    def unlock(self, node: Any, *, is_used: bool = True) -> None:
        """Give one lock back. ``is_used=False``: it came to nothing, nothing was inserted, and it counts as no use."""

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

    def restorable(self, node: Any, token_ids: Sequence[int]) -> int:
        """Blocks of ``token_ids``, which follow the locked path ``node``, that ``restore`` would probably bring back.

        From the first block on; may wait for the workers. A cache without tiers has none.
        """
        return 0

    def restore(self, node: Any, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Any, list[bool]]:
        """Bring blocks back into ``block_ids``, the caller's own, and insert them after the locked path ``node``.

        Like ``insert``, but the list ends where bringing back failed: blocks beyond it stay the caller's, content
        undefined. A doubt about a block is a failure.
        """
        return node, []

    def prepare(self, namespace: str, token_ids: Sequence[int]) -> int | None:
        """A sequence waits to start: begin to bring nearer what ``restore`` would bring back of its tokens.

        Returns a ticket; None: there is nothing to wait for. A cache without tiers has nothing.
        """
        return None

    def are_prepared(self, tickets: Sequence[int]) -> list[bool]:
        """Of each ticket, whether its sequence should wait no longer. Asked again and again while it waits."""
        return [True] * len(tickets)

    def leave(self, ticket: int) -> None:
        """The ticket's sequence has started, or ended."""

    def take_saves(self) -> BlockSaves | None:
        """Copies that the next batch must make, each handed out once. Asked for with every batch.

        ``evict`` hands blocks out at once; what they held can be saved until the next batch runs.
        """
        return None

    def save_evicted(self) -> None:
        """Make the copies that blocks handed out by ``evict`` are owed now: what fills them waits for no batch."""

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
        """Blocks ``evict`` could hand out now, never more than it could; while no node is locked, all it owns."""


@dataclass(frozen=True, kw_only=True)
class PrefixCacheSpec(Declaration):
    """Declares a prefix cache.

    tiers: cache tiers it always brings, fastest first, before those of ``--cache-tiers``; None: it uses no tiers.
    saves_evicted: its ``save_evicted`` makes these copies, so that blocks may be filled between steps.
    """

    family: ClassVar[str] = "cache"

    tiers: tuple[str, ...] | None = None
    saves_evicted: bool = False


@dataclass(frozen=True, slots=True)
class CacheTierContext:
    """What a cache tier is built with, once in each worker.

    num_blocks: blocks of the worker's KV cache.
    block_bytes: bytes of one block, over all layers; every entry has this size.
    identity: 32 bytes that differ whenever the bytes of a block would mean something else: model, precision, layout,
        rank. A store that others use too, or that outlives the process, must keep entries of other identities apart.
    device: "cpu" or "cuda".

    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    num_blocks: int
    block_bytes: int
    identity: bytes
    device: str = "cpu"
    options: Any = None


class CacheTier(ABC):
    """A store of K/V blocks by content key. It may fail; a doubt about an entry is a miss.

    One thread calls it. What it raises is logged once and counts as a miss. A constructor raises ``ConfigError`` when
    the options cannot work here.
    """

    def __init__(self, context: CacheTierContext) -> None:
        self.context = context

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """Whether ``get`` would probably find the entry; counts as a use of it. Never blocks for long."""

    @abstractmethod
    def get(self, key: bytes, into: memoryview) -> bool:
        """Copy the entry into ``into``; False when it is not there, damaged, or of another model or shape.

        What is in ``into`` after False is undefined.
        """

    @abstractmethod
    def put(self, key: bytes, data: memoryview) -> bool:
        """Keep a copy; False when there is no room. ``data`` is the caller's again on return.

        A slow store copies and writes in a thread of its own.
        """

    @property
    def num_entries(self) -> int | None:
        """Its capacity in entries; None: unknown."""
        return None

    @property
    def trouble(self) -> str | None:
        """Why it keeps or finds nothing at present: /health says so. O(1)."""
        return None

    def reader(self) -> Callable[[bytes, memoryview], bool] | None:
        """What reads like ``get``, called by one other thread while this tier is used; None: there is no such thing.

        A tier that has one is read ahead, into the fastest tier, while sequences wait. It is for tiers that may be
        slow: a step waits for what ``get`` reads.
        """
        return None

    def close(self) -> None:
        """Finish or give up what is under way, within a second."""


@dataclass(frozen=True, kw_only=True)
class CacheTierSpec(Declaration):
    """Declares a cache tier.

    outlives_process: whether its entries may be read by another process, or a later one. Only then the ``identity`` of
    its context has a hash of the model's files, for which the start may have to wait.
    """

    family: ClassVar[str] = "cache_tiers"

    outlives_process: bool = True
