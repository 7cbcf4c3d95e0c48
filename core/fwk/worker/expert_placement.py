"""Which experts this worker's ranks hold: at the start, and after a rebalancing between two steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fwk.config import EngineOptions
from fwk.errors import ConfigError, FwkError, ModelLoadError, one_line_traceback
from fwk.interfaces.expert_placement import ExpertPlacement, ExpertPlacer, PlacedLayer, PlacementShape
from fwk.interfaces.moe import Routing
from fwk.interfaces.parallel import ParallelGroup
from fwk.types import Batch
from fwk.worker.expert_location import TRIVIAL, InitialLocation
from fwk.worker.observing import Runner

log = logging.getLogger(__name__)


def is_placed(options: EngineOptions) -> bool:
    """Whether experts are, or may come to be, elsewhere than in equal ranges."""
    return bool(options.ep_num_redundant_experts or options.init_expert_location != TRIVIAL or options.enable_eplb)


def goes_by_counts(options: EngineOptions, location: InitialLocation | None) -> bool:
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
        options: EngineOptions,
        location: InitialLocation | None,
        placer: ExpertPlacer | None,
        num_layers: int,
        num_nodes: int = 1,
    ) -> None:
        """placer: where something goes by counts. num_layers: of the model, with experts or without. num_nodes:
        machines; ranks that share experts may be spread over them, and then count as one machine's.
        """
        self.by_row = options.ep_dispatch_algorithm == "dynamic"
        self.counts = options.enable_eplb
        self.layers: list[PlacedLayer] = []
        self._options, self._location, self._placer = options, location, placer
        self._num_layers = num_layers
        self._num_nodes = 1 if options.expert_parallel_size % num_nodes else num_nodes
        self._asked = 0

    def shape(self, name: str, routing: Routing) -> PlacementShape:
        more, ranks = self._options.ep_num_redundant_experts, self._options.expert_parallel_size
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
        """The slots that the algorithm gives a layer."""
        assert self._placer is not None, "placements that go by counts are given one"
        source = f"--eplb-algorithm {self._options.eplb_algorithm}: {name}"
        return checked(self._placer.place(loads, shape), shape, source)

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


def kept_in_place(slots: Sequence[int], now: Sequence[int], num_ranks: int) -> list[int]:
    """The same experts on each rank, those it holds already in the slots where they are."""
    size, found = len(now) // num_ranks, list[int]()
    for first in range(0, len(now), size):
        wanted, held = list(slots[first : first + size]), list(now[first : first + size])
        stays: list[int | None] = []
        for expert in held:
            if expert in wanted:
                wanted.remove(expert)
                stays.append(expert)
            else:
                stays.append(None)
        found += [wanted.pop(0) if expert is None else expert for expert in stays]
    return found


def utilization(loads: Sequence[int], slots: Sequence[int], num_ranks: int) -> float | None:
    """The mean number of tokens of a rank, divided by the largest; None where there were none.

    An expert's tokens count as evenly shared by its replicas.
    """
    size = len(slots) // num_ranks
    each = [loads[expert] / slots.count(expert) for expert in slots]
    ranks = [sum(each[first : first + size]) for first in range(0, len(each), size)]
    return sum(ranks) / num_ranks / max(ranks) if max(ranks) else None


class Rebalancer:
    """Runs steps, and between them gives ranks other experts.

    All ranks see the same tokens and count the same. They take the slots that the first rank finds, so that no
    algorithm can make them differ, and exchange experts after the same step.
    """

    def __init__(
        self, runner: Runner, options: EngineOptions, placement: Callable[[], ModelPlacement], group: ParallelGroup
    ) -> None:
        """placement: of the model that serves now."""
        self._runner, self._options, self._group = runner, options, group
        self._placement = placement
        self._num_steps = 0
        self._waiting: deque[tuple[PlacedLayer, list[int]]] = deque()
        self.num_rebalancings = self.num_moved = 0
        self.last: float | None = None
        """The utilization when slots were last thought about."""
        self.collect = runner.collect
        self.settle = runner.settle
        for layer in placement().layers:
            _counts(layer).zero_()  # of warming up

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Any:
        """As the runner does; experts move after the step, for the next one."""
        pending = self._runner.launch(batch)
        try:
            self._after_step()
        except FwkError as error:  # a refusal would leave this rank alone with its experts
            raise RuntimeError(f"experts could not be moved: {error}") from error
        return pending

    def told(self) -> dict[str, Any]:
        """What an administrator sees."""
        return {
            "num_rebalancings": self.num_rebalancings,
            "num_moved_layers": self.num_moved,
            "num_waiting_layers": len(self._waiting),
            "utilization": self.last,
            "physical_to_logical_map": [list(layer.slots) for layer in self._placement().layers],
        }

    def _after_step(self) -> None:
        layers = self._placement().layers
        if self._waiting and self._waiting[0][0] not in layers:
            self._waiting.clear()  # other weights serve
        if self._waiting:
            for _ in range(self._options.eplb_rebalance_layers_per_chunk or len(self._waiting)):
                if self._waiting:
                    layer, slots = self._waiting.popleft()
                    layer.place(slots)
                    self.num_moved += 1
            return
        self._num_steps += 1
        if self._num_steps >= self._options.eplb_rebalance_num_iterations:
            self._num_steps = 0
            self._plan(layers)

    def _plan(self, layers: list[PlacedLayer]) -> None:
        loads: list[list[int]] = [_counts(layer).tolist() for layer in layers]
        for layer in layers:
            _counts(layer).zero_()
        now = [list(layer.slots) for layer in layers]
        self.last = _mean(layers, loads, now)
        plans = self._of_first(self._better(layers, loads) if self._group.rank == 0 else now, layers)
        moved = [(layer, slots) for layer, slots in zip(layers, plans, strict=True) if tuple(slots) != layer.slots]
        if not moved:
            return
        self._waiting.extend(moved)
        self.num_rebalancings += 1
        if self._group.rank == 0:
            log.info(
                "experts of %d of %d layers move: ranks had %.2f of the tokens of the busiest, and would have had %.2f",
                *(len(moved), len(layers), self.last, _mean(layers, loads, plans)),
            )

    def _better(self, layers: list[PlacedLayer], loads: list[list[int]]) -> list[list[int]]:
        """The slots that the algorithm finds; those of now where ranks are used well enough, or it fails."""
        now = [list(layer.slots) for layer in layers]
        if self.last is None or self.last > self._options.eplb_min_rebalancing_utilization_threshold:
            return now
        try:
            found = [
                self._placement().balanced(layer.name, row, layer.shape)
                for layer, row in zip(layers, loads, strict=True)
            ]
        except Exception as error:  # of another package's algorithm: the placement of now is whole
            log.error("experts stay where they are: %s", one_line_traceback(error))
            return now
        return [
            kept_in_place(slots, layer.slots, layer.shape.num_ranks) for slots, layer in zip(found, layers, strict=True)
        ]

    def _of_first(self, plans: list[list[int]], layers: list[PlacedLayer]) -> list[list[int]]:
        """The first rank's plans."""
        device = _counts(layers[0]).device
        flat = torch.tensor([expert for slots in plans for expert in slots], device=device)
        first = self._group.all_gather(flat.unsqueeze(0), 0)[0]
        return [part.tolist() for part in first.split([len(slots) for slots in plans])]


def _counts(layer: PlacedLayer) -> torch.Tensor:
    assert layer.counts is not None, "placement.counts"
    return layer.counts


def _mean(layers: list[PlacedLayer], loads: list[list[int]], slots: list[list[int]]) -> float | None:
    """The utilization of ranks over layers that had tokens; None without any."""
    ranks = [layer.shape.num_ranks for layer in layers]
    known = [x for args in zip(loads, slots, ranks, strict=True) if (x := utilization(*args)) is not None]
    return sum(known) / len(known) if known else None
