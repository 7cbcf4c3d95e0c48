"""The prefix cache as the engine asks it: one that fails is left out, and its name is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import Any

from fwk.errors import FwkError, PluginFault, one_line_traceback
from fwk.interfaces.prefix_cache import CacheContext, PrefixCache, PrefixMatch
from fwk.types import BlockSaves

log = logging.getLogger(__name__)


class CheckedCache(PrefixCache):
    """The cache until it raises, or answers what cannot be; then each prompt is computed in full.

    The blocks it owns are known here: those that no sequence uses go back to the allocator when it has failed.
    """

    def __init__(
        self,
        cache: PrefixCache,
        block_size: int,
        name: str,
        in_use: Callable[[], Iterable[int] | None],
        failed: Callable[[str], None],
    ) -> None:
        """name: for messages, with its package. in_use: the cache's blocks that sequences use; None: perhaps all.

        failed: told once why it is left out.
        """
        super().__init__(CacheContext(block_size))
        self._cache, self._name, self._in_use, self._failed = cache, name, in_use, failed
        self._is_on = True
        self._owned = set[int]()
        self._matched: list[int] = []
        self._locked: list[int] = []  # last, perhaps for a sequence that has not started
        self._num_locks = 0

    def match(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        def is_right(found: PrefixMatch) -> bool:
            length = len(found.block_ids) * self.context.block_size
            return found.num_tokens == length <= max(max_tokens, 0) and self._owned.issuperset(found.block_ids)

        found = self._ask("match", PrefixMatch(None, [], 0), is_right, namespace, token_ids, max_tokens)
        self._matched = found.block_ids
        return found

    def lock(self, node: Any) -> None:
        self._locked = self._matched
        self._num_locks += 1
        self._ask("lock", None, None, node)

    def unlock(self, node: Any, *, is_used: bool = True) -> None:
        self._locked = self._locked if is_used else []
        self._ask("unlock", None, None, node, is_used=is_used)
        self._num_locks -= 1
        if self._num_locks == 0:  # blocks that it would keep from everybody, for ever, show now
            self._count_evictable()

    def insert(self, node: Any, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Any, list[bool]]:
        return self._insert("insert", [False] * len(block_ids), node, token_ids, block_ids)

    def restore(self, node: Any, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Any, list[bool]]:
        return self._insert("restore", [], node, token_ids, block_ids)

    def restorable(self, node: Any, token_ids: Sequence[int]) -> int:
        most = len(token_ids) // self.context.block_size
        return self._ask("restorable", 0, lambda count: 0 <= count <= most, node, token_ids)

    def evict(self, num_blocks: int) -> list[int]:
        least = min(num_blocks, self.num_evictable_blocks)

        def is_right(found: list[int]) -> bool:
            return least <= len(found) <= num_blocks and self._are_its_own(found)

        blocks = self._ask("evict", None, is_right, num_blocks)
        blocks = sorted(self._unused())[:num_blocks] if blocks is None else blocks
        self._owned.difference_update(blocks)
        if len(blocks) < least:
            raise PluginFault(f"prefix cache {self._name} answered {least} in num_evictable_blocks, not {len(blocks)}")
        return blocks

    def drop(self) -> list[int]:
        blocks = self._ask("drop", None, self._are_its_own)
        blocks = list(self._unused()) if blocks is None else blocks
        self._owned.difference_update(blocks)
        return blocks

    def prepare(self, namespace: str, token_ids: Sequence[int]) -> int | None:
        return self._ask("prepare", None, None, namespace, token_ids)

    def are_prepared(self, tickets: Sequence[int]) -> list[bool]:
        return self._ask("are_prepared", [True] * len(tickets), lambda found: len(found) == len(tickets), tickets)

    def leave(self, ticket: int) -> None:
        self._ask("leave", None, None, ticket)

    def take_saves(self) -> BlockSaves | None:
        self._locked = []  # the sequences of the batch run
        return self._ask("take_saves", None, None)

    def save_evicted(self) -> None:
        self._ask("save_evicted", None, None)

    def root(self, namespace: str) -> Any:
        return self._ask("root", None, None, namespace)

    @property
    def num_blocks(self) -> int:
        return self._ask("num_blocks", len(self._owned), lambda count: count == len(self._owned))

    @property
    def num_evictable_blocks(self) -> int:
        return self._count_evictable()

    def _count_evictable(self) -> int:
        most = len(self._owned)
        least = 0 if self._num_locks else most
        count = self._ask("num_evictable_blocks", -1, lambda count: least <= count <= most)
        return count if count >= 0 else len(self._unused())

    def _insert(self, name: str, default: list[bool], node: Any, token_ids: Any, blocks: Any) -> tuple[Any, list[bool]]:
        def is_right(answer: tuple[Any, list[bool]]) -> bool:
            return len(answer[1]) == len(blocks) or (name == "restore" and len(answer[1]) < len(blocks))

        node, taken = self._ask(name, (node, default), is_right, node, token_ids, blocks)
        self._owned.update(compress(blocks, taken))
        return node, taken

    def _are_its_own(self, blocks: list[int]) -> bool:
        return len(set(blocks)) == len(blocks) and self._owned.issuperset(blocks)

    def _unused(self) -> set[int]:
        """Blocks that a cache which has failed owns, and no sequence needs."""
        in_use = self._in_use() if self._owned else None
        return set() if in_use is None else self._owned.difference(chain(in_use, self._locked))

    def _ask(self, name: str, default: Any, is_right: Callable[[Any], bool] | None, *args: Any, **given: Any) -> Any:
        """What the cache answers, or ``default`` once it has failed."""
        if self._is_on:
            try:
                answer = getattr(self._cache, name)
                answer = answer(*args, **given) if callable(answer) else answer
                if is_right is None or is_right(answer):
                    return answer
                raise PluginFault(f"prefix cache {self._name} answered {answer!r:.100} in {name}, which cannot be")
            except Exception as error:
                if isinstance(error, FwkError) and not isinstance(error, PluginFault):
                    raise
                is_told = isinstance(error, PluginFault)
                why = str(error) if is_told else f"prefix cache {self._name} raised {type(error).__name__} in {name}"
                log.error("%s; prompts are computed in full: %s", why, one_line_traceback(error.__cause__ or error))
                self._failed(f"{why}; prompts are computed in full")
                self._is_on = False
        return default
