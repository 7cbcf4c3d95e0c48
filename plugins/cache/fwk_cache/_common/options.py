"""Options of every cache that keeps a trie of blocks."""

from __future__ import annotations

from typing import Literal

from fwk import Options, option


class EvictionOptions(Options):
    """Which blocks go first."""

    radix_eviction_policy: Literal["lru", "lfu"] = option(
        "lru",
        "Which cached blocks go first when room is needed: the least recently used, or the least frequently used (of "
        "those used equally often, the least recently used).",
    )
