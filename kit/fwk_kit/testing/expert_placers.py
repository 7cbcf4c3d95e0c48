"""What every algorithm of expert placement must do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from fwk.interfaces.expert_placement import ExpertPlacer, ExpertPlacerContext, PlacementShape
from fwk.plugins import Registered
from fwk_kit.testing.base import PluginSuite
from fwk_kit.testing.serving import MIXTURE

SHAPES = (
    PlacementShape(8, 8, 2),
    PlacementShape(8, 12, 4),
    PlacementShape(5, 6, 2),
    PlacementShape(3, 12, 4),
    PlacementShape(16, 24, 8, num_groups=4),
    PlacementShape(16, 24, 8, num_groups=4, num_nodes=2),
    PlacementShape(12, 16, 4, num_groups=3, num_nodes=2),
)


def loads_of(shape: PlacementShape) -> list[list[int]]:
    """Skewed, even and no loads."""
    rng = random.Random(shape.num_slots)
    skewed = [int(1000 / (1 + rank)) for rank in range(shape.num_experts)]
    rng.shuffle(skewed)
    return [skewed, [7] * shape.num_experts, [0] * shape.num_experts, [0] * (shape.num_experts - 1) + [9]]


class ExpertPlacerSuite(PluginSuite):
    """Every slot holds an expert of the model, and no expert is left out."""

    family = "expert_placers"
    interface = ExpertPlacer

    serve_with: ClassVar[Mapping[str, Any]] = {
        "enable_eplb": True,
        "eplb_rebalance_num_iterations": 2,
        "tensor_parallel_size": 2,
        "expert_parallel_size": 2,
    }

    def config_to_serve(self) -> Mapping[str, Any]:
        return MIXTURE

    def placer(self, item: Registered) -> ExpertPlacer:
        return self.make(item, ExpertPlacerContext(self.given(item)))

    def exercise(self, item: Registered) -> None:
        self.test_every_expert_has_a_slot_and_every_slot_an_expert(item)

    def test_every_expert_has_a_slot_and_every_slot_an_expert(self, item: Registered) -> None:
        placer = self.placer(item)
        for shape in SHAPES:
            for loads in loads_of(shape):
                before = list(loads)
                slots = placer.place(loads, shape)
                assert len(slots) == shape.num_slots, f"{len(slots)} slots for {shape}"
                assert set(slots) == set(range(shape.num_experts)), f"{slots} for {shape}"
                assert loads == before, "the loads are the caller's"

    def test_ranks_find_the_same(self, item: Registered) -> None:
        """Each asks an object of its own, whatever that was asked before."""
        one, two = self.placer(item), self.placer(item)
        two.place([3, 1, 2], PlacementShape(3, 4, 2))
        for shape in SHAPES:
            for loads in loads_of(shape):
                assert one.place(loads, shape) == two.place(loads, shape)
