"""Experts in order, and the busiest ones again in the slots that are left."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.interfaces.expert_placement import ExpertPlacer, PlacementShape


class MinePlacer(ExpertPlacer):
    """No state: the same loads give the same slots on every rank."""

    def place(self, loads: Sequence[int], shape: PlacementShape) -> list[int]:
        busiest = sorted(range(shape.num_experts), key=lambda expert: -loads[expert])
        held = list(range(shape.num_experts))
        while len(held) < shape.num_slots:
            held += busiest[: shape.num_slots - len(held)]
        return held
