"""Counts at GET /mine/stats."""

from __future__ import annotations

from fwk import ObserverSpec, hookimpl


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="mine",
            load="fwk_mine.plugin:MineObserver",
            summary="counts at GET /mine/stats",
        )
    ]
