"""Shortest prompt first, with a bound on waiting."""

from __future__ import annotations

from fwk import Options, SchedulePolicySpec, hookimpl, option


class MineOptions(Options):
    """Options of ``schedulers.mine``."""

    mine_rate: float = option(100.0, "Tokens that a second of waiting is worth.", ge=0, le=1e6)


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="mine",
            load="fwk_mine.plugin:MinePolicy",
            options=MineOptions,
            summary="shortest prompt first, with a bound on waiting",
        )
    ]
