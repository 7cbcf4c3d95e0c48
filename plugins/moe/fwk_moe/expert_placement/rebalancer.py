"""Ranks are given other experts between two steps, as the tokens of each are counted."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from fwk.errors import FwkError, one_line_traceback
from fwk.interfaces.expert_placement import PlacedLayer
from fwk.interfaces.parallel import ParallelGroup
from fwk_moe.expert_placement import ExpertPlacementOptions
from fwk_moe.expert_placement.placement import ModelPlacement

log = logging.getLogger("fwk.expert_placement")


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
    """Gives ranks other experts between two steps.

    All ranks see the same tokens and count the same. They take the slots that the first rank finds, so that no
    algorithm can make them differ, and exchange experts after the same step.
    """

    def __init__(self, options: ExpertPlacementOptions, placement: ModelPlacement, group: ParallelGroup) -> None:
        self._options, self._group = options, group
        self._num_steps = 0
        self._waiting: deque[tuple[PlacedLayer, list[int]]] = deque()
        self.num_rebalancings = self.num_moved = 0
        self.last: float | None = None
        """The utilization when slots were last thought about."""
        self.serve(placement)

    def serve(self, placement: ModelPlacement) -> None:
        """Steps from here on are computed with the layers of ``placement``."""
        self._placement = placement
        self._waiting.clear()
        for layer in placement.layers:
            _counts(layer).zero_()  # of warming up

    def after_step(self) -> None:
        """A step was launched: experts move for the next one."""
        try:
            self._after_step()
        except FwkError as error:  # a refusal would leave this rank alone with its experts
            raise RuntimeError(f"experts could not be moved: {error}") from error

    def told(self) -> dict[str, Any]:
        """What an administrator sees."""
        return {
            "num_rebalancings": self.num_rebalancings,
            "num_moved_layers": self.num_moved,
            "num_waiting_layers": len(self._waiting),
            "utilization": self.last,
            "physical_to_logical_map": [list(layer.slots) for layer in self._placement.layers],
        }

    def _after_step(self) -> None:
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
            self._plan(self._placement.layers)

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
                self._placement.balanced(layer.name, row, layer.shape) for layer, row in zip(layers, loads, strict=True)
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
