"""A prefix cache in one dictionary."""

from __future__ import annotations

from fwk import PrefixCacheSpec, hookimpl


@hookimpl
def prefix_caches() -> list[PrefixCacheSpec]:
    return [
        PrefixCacheSpec(
            name="mine",
            load="fwk_mine.plugin:MineCache",
            summary="a prefix cache in one dictionary",
        )
    ]
