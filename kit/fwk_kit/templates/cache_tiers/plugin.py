"""Blocks in a dictionary: a tier for trying out what tiers do."""

from __future__ import annotations

from collections import OrderedDict

from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext


class MineTier(CacheTier):
    """Keeps the most recently used."""

    def __init__(self, context: CacheTierContext) -> None:
        super().__init__(context)
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()

    def contains(self, key: bytes) -> bool:
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return key in self._blocks

    def get(self, key: bytes, into: memoryview) -> bool:
        found = self._blocks.get(key)
        if found is None:
            return False
        into[:] = found
        return True

    def put(self, key: bytes, data: memoryview) -> bool:
        self._blocks[key] = bytes(data)  # a copy: data is the caller's again
        self._blocks.move_to_end(key)
        while len(self._blocks) > self.context.options.mine_max_blocks:
            self._blocks.popitem(last=False)
        return True
