"""Mixtures of experts by a loop."""

from __future__ import annotations

from fwk import MoERunnerSpec, hookimpl


@hookimpl
def moe_runners() -> list[MoERunnerSpec]:
    return [
        MoERunnerSpec(
            name="mine",
            load="fwk_mine.plugin:MineRunner",
            summary="mixtures of experts by a loop",
        )
    ]
