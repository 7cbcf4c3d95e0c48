"""The engine's way to the cache tiers, which live with the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fwk.interfaces.prefix_cache import BlockTransfer


class WorkerTransfer(BlockTransfer):
    """Asks every worker, between steps; what one of them lacks, none has.

    An executor runs calls in the order of its launches, so steps launched earlier have left their K/V, and later ones
    find what was loaded.
    """

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        """call: ``EnginePartContext.call``."""
        self._call = call
        self._can_prefetch: bool | None = None  # the workers are asked once

    def find(self, saves: Sequence[tuple[bytes, int]], keys: Sequence[bytes], is_near: bool = False) -> int:
        return min(self._call("find_blocks", list(saves), list(keys), is_near))

    def load(
        self,
        saves: Sequence[tuple[bytes, int]],
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        is_near: bool = False,
    ) -> int:
        return min(self._call("load_blocks", list(saves), list(keys), list(block_ids), is_near))

    @property
    def can_prefetch(self) -> bool:
        if self._can_prefetch is None:
            self._can_prefetch = all(self._call("can_prefetch"))
        return self._can_prefetch

    def prefetch(self, number: int, keys: Sequence[bytes]) -> bool:
        return any(self._call("prefetch_blocks", number, list(keys)))

    def prefetched(self, numbers: Sequence[int]) -> list[bool]:
        answers = self._call("prefetched_blocks", list(numbers))
        return [all(each) for each in zip(*answers, strict=True)]

    def end_prefetch(self, number: int) -> None:
        self._call("end_prefetch", number)
