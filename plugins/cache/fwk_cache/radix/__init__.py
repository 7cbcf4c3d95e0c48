"""Reuse of K/V by a trie of blocks; the least recently used ones go first."""

from __future__ import annotations

from fwk import PrefixCacheSpec, hookimpl


@hookimpl
def prefix_caches() -> list[PrefixCacheSpec]:
    return [
        PrefixCacheSpec(
            name="radix",
            load="fwk_cache.radix.cache:RadixPrefixCache",
            rank=10,
            summary="Keeps the blocks of earlier prompts and answers in a trie; evicts the least recently used.",
        )
    ]
