"""Blocks in a dictionary."""

from __future__ import annotations

from fwk import CacheTierSpec, Options, hookimpl, option


class MineOptions(Options):
    """Options of ``cache_tiers.mine``."""

    mine_max_blocks: int = option(256, "Blocks kept in memory.", ge=1, le=2**20)


@hookimpl
def cache_tiers() -> list[CacheTierSpec]:
    return [
        CacheTierSpec(
            name="mine",
            load="fwk_mine.plugin:MineTier",
            options=MineOptions,
            summary="blocks in a dictionary",
        )
    ]
