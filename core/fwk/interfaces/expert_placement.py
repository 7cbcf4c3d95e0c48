"""Which rank holds which experts of a layer, and how many replicas of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.moe import Routing


@dataclass(frozen=True, slots=True)
class PlacementShape:
    """What a placement has to fill: ``num_slots`` slots, equally many on each rank and in each node.

    num_experts: of the router; at most num_slots, which num_ranks divides.
    num_groups: equal groups of consecutive experts of which a token chooses few (``Routing.num_groups``).
    num_nodes: machines; num_nodes divides num_ranks, and ranks of a machine are consecutive.

    - ``num_ranks``: of the expert-parallel group.
    """

    num_experts: int
    num_slots: int
    num_ranks: int
    num_groups: int = 1
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class ExpertPlacerContext:
    """What an algorithm is built with.

    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    options: Any = None


class ExpertPlacer(ABC):
    """An algorithm that spreads experts over ranks; one object in each worker, asked between steps."""

    def __init__(self, context: ExpertPlacerContext) -> None:
        self.context = context

    @abstractmethod
    def place(self, loads: Sequence[int], shape: PlacementShape) -> list[int]:
        """The expert in each slot of one layer, [num_slots]; a rank's slots are consecutive.

        loads: [num_experts] tokens that chose each expert, perhaps all zero. Every expert has a slot. The answer
        depends on the arguments alone.
        """


@dataclass(frozen=True, kw_only=True)
class ExpertPlacerSpec(Declaration):
    """Declares an algorithm of expert placement (``--eplb-algorithm``)."""

    family: ClassVar[str] = "expert_placers"


class PlacedLayer(Protocol):
    """The experts of one layer, which can be given other slots between two steps.

    slots: [num_slots] the expert in each slot of all ranks. counts: [num_experts] int64, tokens that chose each expert
    since they were set to zero, if they are counted.

    - ``name``: its prefix in the checkpoint.
    - ``shape``: what its slots are.
    """

    name: str
    shape: PlacementShape
    slots: tuple[int, ...]
    counts: Tensor | None

    def place(self, slots: Sequence[int]) -> None:
        """Hold the experts of this rank's slots from the next step on; all ranks are given the same slots."""


class ExpertPlacement(Protocol):
    """The placement of one model's experts: what its layers ask as they are built.

    by_row: a token's replica follows from its row in the step, not from its experts. counts: layers count tokens.
    """

    by_row: bool
    counts: bool

    def shape(self, name: str, routing: Routing) -> PlacementShape:
        """Of a layer. Raises ``ModelLoadError`` when its experts do not fit the ranks."""
        ...

    def slots(self, name: str, shape: PlacementShape) -> Sequence[int]:
        """The expert in each slot of a layer's ranks. Layers ask in the model's order."""
        ...

    def add(self, layer: PlacedLayer) -> None:
        """A layer was built."""
