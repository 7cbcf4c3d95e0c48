"""Norms, rotary positions and gates, written out."""

from __future__ import annotations

from fwk import OperatorsSpec, hookimpl


@hookimpl
def operators() -> list[OperatorsSpec]:
    return [
        OperatorsSpec(
            name="mine",
            load="fwk_mine.plugin:MineOperators",
            summary="norms, rotary positions and gates, written out",
        )
    ]
