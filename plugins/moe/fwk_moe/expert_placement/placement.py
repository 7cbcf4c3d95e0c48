"""Which experts ranks hold: at the start, and as an algorithm places them anew."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import index

from fwk.errors import ConfigError, ModelLoadError, PluginFault
from fwk.interfaces.expert_placement import ExpertPlacement, ExpertPlacer, PlacedLayer, PlacementShape
from fwk.interfaces.moe import Routing
from fwk_moe.expert_placement import ExpertPlacementOptions
from fwk_moe.expert_placement.location import InitialLocation


def goes_by_counts(options: ExpertPlacementOptions, location: InitialLocation | None) -> bool:
    """Whether an algorithm is needed. Raises ``ConfigError`` for one that would do nothing."""
    if options.enable_eplb or (location is not None and location.is_counts):
        return True
    if options.eplb_algorithm != "auto":
        raise ConfigError(
            f"--eplb-algorithm {options.eplb_algorithm} goes by the tokens of each expert: add --enable-eplb, or "
            "--init-expert-location with a file of counts"
        )
    return False


class ModelPlacement(ExpertPlacement):
    """The placement of one model's experts, and its layers as they were built."""

    def __init__(
        self,
        options: ExpertPlacementOptions,
        location: InitialLocation | None,
        placer: ExpertPlacer | None,
        num_layers: int,
        num_ranks: int,
        num_nodes: int = 1,
    ) -> None:
        """placer: where something goes by counts. num_layers: of the model, with experts or without. num_ranks: groups
        over which experts are spread. num_nodes: machines; ranks that share experts may be spread over them, and then
        count as one machine's.
        """
        self.by_row = options.ep_dispatch_algorithm == "dynamic"
        self.counts = options.enable_eplb
        self.layers: list[PlacedLayer] = []
        self._options, self._location, self._placer = options, location, placer
        self._num_layers, self._num_ranks = num_layers, num_ranks
        self._num_nodes = 1 if num_ranks % num_nodes else num_nodes
        self._asked = 0

    def shape(self, name: str, routing: Routing) -> PlacementShape:
        more, ranks = self._options.ep_num_redundant_experts, self._num_ranks
        if (routing.num_experts + more) % ranks:
            raise ModelLoadError(
                f"{name}: {routing.num_experts} experts and --ep-num-redundant-experts {more} do not divide by "
                f"--expert-parallel-size {ranks}: add {-(routing.num_experts + more) % ranks} more"
            )
        return PlacementShape(
            routing.num_experts, routing.num_experts + more, ranks, routing.num_groups, self._num_nodes
        )

    def slots(self, name: str, shape: PlacementShape) -> Sequence[int]:
        place, self._asked = self._asked, self._asked + 1
        if self._location is None:
            return [slot % shape.num_experts for slot in range(shape.num_slots)]
        row, source = (
            self._location.row(name, place, self._num_layers),
            f"--init-expert-location {self._location.source}",
        )
        if not self._location.is_counts:
            return checked(row, shape, f"{source}: {name}")
        if len(row) != shape.num_experts:
            raise ModelLoadError(f"{source}: {name} has {shape.num_experts} experts, and counts of {len(row)}")
        return self.balanced(name, row, shape)

    def balanced(self, name: str, loads: Sequence[int], shape: PlacementShape) -> list[int]:
        """The slots that the algorithm gives a layer. Raises ``ModelLoadError`` in its name where it gives none."""
        assert self._placer is not None, "placements that go by counts are given one"
        who = getattr(self._placer.place, "who", "")  # as it is called in messages, with its package
        source = f"{who or f'--eplb-algorithm {self._options.eplb_algorithm}'}: {name}"
        try:
            given = [index(slot) for slot in islice(self._placer.place(loads, shape), shape.num_slots + 1)]
        except PluginFault:
            raise
        except Exception as error:
            raise ModelLoadError(f"{source}: it raised {type(error).__name__}, or gave no list of experts") from error
        return checked(given, shape, source)

    def add(self, layer: PlacedLayer) -> None:
        self.layers.append(layer)


def checked(slots: Sequence[int], shape: PlacementShape, source: str) -> list[int]:
    """The slots. Raises ``ModelLoadError`` when an expert has none, or they are not as many as there are."""
    if len(slots) != shape.num_slots:
        raise ModelLoadError(f"{source} has {shape.num_slots} slots for experts, and {len(slots)} were given")
    missing = sorted(set(range(shape.num_experts)) - set(slots))
    unknown = sorted(set(slots) - set(range(shape.num_experts)))
    if missing or unknown:
        why = f"no slot for expert {missing[0]}" if missing else f"a slot for expert {unknown[0]}, which there is not"
        raise ModelLoadError(f"{source} was given {why}")
    return list(slots)
