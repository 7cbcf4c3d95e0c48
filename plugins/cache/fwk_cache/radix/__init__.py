"""Reuse of K/V by a trie of blocks."""

from __future__ import annotations

from fwk import PrefixCacheSpec, hookimpl
from fwk_cache._common.options import EvictionOptions


@hookimpl
def prefix_caches() -> list[PrefixCacheSpec]:
    return [
        PrefixCacheSpec(
            name="radix",
            load="fwk_cache._common.radix:RadixPrefixCache",
            rank=10,
            switches=("reuse-cache", "use-dynamic-prompt-cache", "enable-prefix-caching"),
            options=EvictionOptions,
            summary="Keeps the blocks of earlier prompts and answers in a trie.",
        )
    ]
