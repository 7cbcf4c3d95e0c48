"""One piece of memory in places of a block each, the least recently used one given away."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import psutil

from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext
from fwk_cache.host import HostOptions


class HostTier(CacheTier):
    """Memory is reserved at once and taken from the system as it fills; it never grows past its size."""

    def __init__(self, context: CacheTierContext) -> None:
        super().__init__(context)
        options: HostOptions = context.options or HostOptions()
        if options.hicache_size is not None:
            self.num_places = int(options.hicache_size * 1e9) // context.block_bytes
            wish = f"--hicache-size {options.hicache_size:g}"
        else:
            self.num_places = int(options.hicache_ratio * context.num_blocks)
            wish = f"--hicache-ratio {options.hicache_ratio:g}"
        size = self.num_places * context.block_bytes
        free = psutil.virtual_memory().available
        if self.num_places < 1 and options.hicache_size is not None:
            raise ConfigError(f"{wish} has no room for one block of {context.block_bytes / 2**20:.2f} MiB")
        if size > free:
            raise ConfigError(f"{wish} is {size / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB of memory are free")
        self._memory = np.empty((self.num_places, context.block_bytes), np.uint8)
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first

    @property
    def num_entries(self) -> int:
        return self.num_places

    def contains(self, key: bytes) -> bool:
        if key not in self._place_of:
            return False
        self._place_of.move_to_end(key)
        return True

    def get(self, key: bytes, into: memoryview) -> bool:
        if not self.contains(key):
            return False
        into[:] = self._memory[self._place_of[key]].data
        return True

    def put(self, key: bytes, data: memoryview) -> bool:
        if self.num_places == 0:
            return False
        place = self._place_of.pop(key, None)
        if place is None:
            place = len(self._place_of)
            if place == self.num_places:
                place = self._place_of.popitem(last=False)[1]
        self._memory[place].data[:] = data
        self._place_of[key] = place
        return True
