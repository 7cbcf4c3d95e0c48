"""Mixtures of experts by a loop."""

from __future__ import annotations

from fwk import MoERunnerSpec, hookimpl
from fwk.interfaces.moe import EXPERT_PARALLEL


@hookimpl
def moe_runners() -> list[MoERunnerSpec]:
    return [
        MoERunnerSpec(
            name="mine",
            load="fwk_mine.plugin:MineRunner",
            offers=frozenset({EXPERT_PARALLEL}),
            summary="mixtures of experts by a loop",
        )
    ]
