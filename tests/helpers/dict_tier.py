"""A cache tier in a dictionary."""

from __future__ import annotations

from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext


class DictTier(CacheTier):
    """Keeps everything and writes down what is asked of it; ``damage`` decides what becomes of an entry."""

    def __init__(self, context: CacheTierContext) -> None:
        super().__init__(context)
        self.entries: dict[bytes, bytes] = {}
        self.puts: list[bytes] = []
        self.lost: set[bytes] = set()

    def contains(self, key: bytes) -> bool:
        return key in self.entries

    def get(self, key: bytes, into: memoryview) -> bool:
        if key in self.lost or key not in self.entries:
            into[:] = b"\x55" * len(into)
            return False
        into[:] = self.entries[key]
        return True

    def put(self, key: bytes, data: memoryview) -> bool:
        self.puts.append(key)
        self.entries[key] = bytes(data)
        return True
