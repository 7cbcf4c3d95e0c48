"""Experts in order, and the busiest ones again."""

from __future__ import annotations

from fwk import ExpertPlacerSpec, hookimpl


@hookimpl
def expert_placers() -> list[ExpertPlacerSpec]:
    return [
        ExpertPlacerSpec(
            name="mine",
            load="fwk_mine.plugin:MinePlacer",
            summary="experts in order, and the busiest ones again",
        )
    ]
