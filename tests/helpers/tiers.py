"""Blocks for tests of cache tiers by themselves: their keys and bytes, and the end of writing."""

from __future__ import annotations

import random
import time
from typing import Any

from fwk.interfaces.prefix_cache import CacheTierContext

SIZE = 4096
CONTEXT = CacheTierContext(num_blocks=10, block_bytes=SIZE, identity=b"i" * 32)


def key(i: int) -> bytes:
    return i.to_bytes(4, "little") * 8


def data(i: int) -> memoryview:
    return memoryview(random.Random(i).randbytes(SIZE))


def settled(tier: Any) -> Any:
    """The tier, once all is written."""
    end = time.monotonic() + 20
    while tier._writer.waiting and time.monotonic() < end:
        time.sleep(0.002)
    assert not tier._writer.waiting
    return tier
