"""The engine's way to the cache tiers, which live with the workers."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.interfaces.executor import Executor
from fwk.interfaces.prefix_cache import BlockTransfer


class WorkerTransfer(BlockTransfer):
    """Asks every worker, between steps; what one of them lacks, none has.

    An executor runs calls in the order of its launches, so steps launched earlier have left their K/V, and later ones
    find what was loaded.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def find(self, saves: Sequence[tuple[bytes, int]], keys: Sequence[bytes]) -> int:
        return min(self._executor.call("find_blocks", list(saves), list(keys)))

    def load(self, saves: Sequence[tuple[bytes, int]], keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        return min(self._executor.call("load_blocks", list(saves), list(keys), list(block_ids)))
