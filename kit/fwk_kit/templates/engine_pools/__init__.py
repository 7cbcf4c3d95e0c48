"""A bound on what one client may have under way."""

from __future__ import annotations

from fwk import EnginePoolSpec, Options, hookimpl, option


class MineOptions(Options):
    """Options of ``engine_pools.mine``."""

    mine_requests_each: int = option(64, "Requests that the holder of one key may have under way.", ge=1, le=2**20)


@hookimpl
def engine_pools() -> list[EnginePoolSpec]:
    return [
        EnginePoolSpec(
            name="mine",
            load="fwk_mine.plugin:MinePool",
            options=MineOptions,
            summary="a bound on what one client may have under way",
        )
    ]
