"""Reuse of K/V by a trie of blocks, with tiers that keep what the device has no room for."""

from __future__ import annotations

from typing import Literal

from fwk import PrefixCacheSpec, hookimpl, option
from fwk_cache._common.options import EvictionOptions


class HierarchicalOptions(EvictionOptions):
    """Options of ``cache.hierarchical``, alongside those of the trie."""

    hicache_write_policy: Literal["write_through", "write_back"] = option(
        "write_through",
        "When blocks are copied to the tiers: as soon as they are full (a server that is stopped loses nothing), or "
        "only when they are evicted from the device.",
        stability="beta",
    )
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = option(
        "timeout",
        "What a request waits for whose K/V are read from files or another server into host memory: for nothing, it "
        "starts with what has arrived; for all of it; or for all of it until --hicache-storage-prefetch-timeout.",
        stability="beta",
    )
    hicache_storage_prefetch_timeout: float = option(
        2.0, "Seconds that a request waits for its K/V under the policy timeout.", gt=0, le=3600, stability="beta"
    )


@hookimpl
def prefix_caches() -> list[PrefixCacheSpec]:
    return [
        PrefixCacheSpec(
            name="hierarchical",
            load="fwk_cache.hierarchical.cache:HierarchicalCache",
            switches=("enable-hierarchical-cache",),
            options=HierarchicalOptions,
            tiers=("host",),
            saves_evicted=True,
            rank=-10,  # only when asked for: it takes as much host memory again
            summary="radix, with evicted blocks kept in host memory and, if asked for, in files.",
        ),
        PrefixCacheSpec(
            name="lmcache",
            load="fwk_cache.hierarchical.cache:HierarchicalCache",
            switches=("enable-lmcache",),
            options=HierarchicalOptions,
            tiers=("host", "lmcache"),
            saves_evicted=True,
            rank=-20,
            summary="hierarchical, with an LMCache server (--hicache-lmcache-url) after host memory.",
        ),
    ]
