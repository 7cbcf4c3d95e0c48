"""No reuse of K/V: every prompt is computed in full."""

from __future__ import annotations

from fwk import PrefixCacheSpec, hookimpl


@hookimpl
def prefix_caches() -> list[PrefixCacheSpec]:
    return [
        PrefixCacheSpec(
            name="none",
            switches=("disable-radix-cache", "disable-dynamic-prompt-cache", "no-enable-prefix-caching"),
            load="fwk_cache.none.cache:NoPrefixCache",
            summary="Keeps nothing: each prompt is computed in full.",
        )
    ]
