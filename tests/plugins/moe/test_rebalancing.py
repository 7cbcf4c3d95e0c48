"""Rebalancing between steps: when, how many layers at a time, whose plan, and what a failing algorithm does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helpers.models import on_ranks
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.expert_placement import ExpertPlacer, ExpertPlacerContext, PlacementShape
from fwk.interfaces.moe import Routing
from fwk.interfaces.parallel import ParallelGroup, SingleRank
from fwk_moe.expert_placement import ExpertPlacementOptions
from fwk_moe.expert_placement.placement import ModelPlacement
from fwk_moe.expert_placement.rebalancer import Rebalancer

SHAPE = PlacementShape(4, 4, 2)


class Layer:
    """Counts what it is given at each step."""

    def __init__(self, index: int, loads: Sequence[int]) -> None:
        self.name, self.shape, self.slots = f"model.layers.{index}.mlp.experts", SHAPE, (0, 1, 2, 3)
        self.counts: Tensor | None = torch.zeros(4, dtype=torch.int64)
        self.loads = torch.tensor(loads)
        self.can_read = True

    def place(self, slots: Sequence[int]) -> None:
        if not self.can_read:
            raise ModelLoadError("the checkpoint is gone")
        self.slots = tuple(slots)


class Reversed(ExpertPlacer):
    """Counted and given loads; each expert in the slot that it is not in."""

    def __init__(self, slots: Sequence[int] = (3, 1, 2, 0)) -> None:
        super().__init__(ExpertPlacerContext())
        self.slots, self.asked = list(slots), list[list[int]]()

    def place(self, loads: Sequence[int], shape: PlacementShape) -> list[int]:
        self.asked.append(list(loads))
        return self.slots


def made(
    placer: ExpertPlacer, group: ParallelGroup | None = None, num_layers: int = 3, **given: Any
) -> tuple[Rebalancer, list[Layer]]:
    options = ExpertPlacementOptions(enable_eplb=True, eplb_rebalance_num_iterations=2, **given)
    placement = ModelPlacement(options, None, placer, num_layers, 2)
    layers = [Layer(index, [30, 10, 5 + index, 0]) for index in range(num_layers)]
    for layer in layers:
        assert layer.counts is not None
        layer.counts += 100  # of warming up
        placement.add(layer)
    return Rebalancer(options, placement, group or SingleRank()), layers


def step(rebalancer: Rebalancer, layers: Sequence[Layer]) -> None:
    """A step that is its counts, and what comes after it."""
    for layer in layers:
        assert layer.counts is not None
        layer.counts += layer.loads
    rebalancer.after_step()


def test_layers_move_by_chunks_after_the_steps_that_were_counted() -> None:
    placer = Reversed()
    rebalancer, layers = made(placer, eplb_rebalance_layers_per_chunk=2)
    seen: list[int] = []
    for _ in range(6):
        step(rebalancer, layers)
        seen.append(sum(layer.slots == (3, 1, 2, 0) for layer in layers))
    assert seen == [0, 0, 2, 3, 3, 3]
    assert placer.asked[:3] == [[60, 20, 10 + 2 * index, 0] for index in range(3)]  # without warming up
    assert placer.asked[3:] == [[120, 40, 20 + 4 * index, 0] for index in range(3)]  # also while layers moved
    told = rebalancer.told()
    assert (told["num_rebalancings"], told["num_moved_layers"], told["num_waiting_layers"]) == (1, 3, 0)
    assert told["physical_to_logical_map"] == [[3, 1, 2, 0]] * 3


@pytest.mark.parametrize(("threshold", "moves"), [(0.5, False), (0.6, True)])
def test_ranks_that_are_used_well_enough_are_left_alone(threshold: float, moves: bool) -> None:
    """40 and 5 tokens: 22.5 on average, 0.5625 of 40."""
    placer = Reversed()
    rebalancer, layers = made(placer, num_layers=1, eplb_min_rebalancing_utilization_threshold=threshold)
    for _ in range(3):
        step(rebalancer, layers)
    assert bool(placer.asked) == moves
    assert (layers[0].slots != (0, 1, 2, 3)) == moves
    assert rebalancer.last == pytest.approx(0.5625)


def test_without_tokens_nothing_moves() -> None:
    placer = Reversed()
    rebalancer, layers = made(placer, num_layers=1)
    layers[0].loads.zero_()
    for _ in range(5):
        step(rebalancer, layers)
    assert not placer.asked
    assert rebalancer.last is None


def test_ranks_take_the_plan_of_the_first() -> None:
    """Whatever another rank's algorithm would find; it is not asked."""
    placers = [Reversed((0, 2, 1, 3)), Reversed((3, 1, 2, 0))]

    def run(group: ParallelGroup) -> Tensor:
        rebalancer, layers = made(placers[group.rank], group)
        for _ in range(3):
            step(rebalancer, layers)
        return torch.tensor([layer.slots for layer in layers])

    for slots in on_ranks(2, run):
        assert slots.tolist() == [[0, 2, 1, 3]] * 3
    assert not placers[1].asked


@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4]])
def test_an_algorithm_that_fails_moves_nothing(slots: list[int], caplog: pytest.LogCaptureFixture) -> None:
    rebalancer, layers = made(Reversed(slots))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            step(rebalancer, layers)
    assert {layer.slots for layer in layers} == {(0, 1, 2, 3)}
    assert "experts stay where they are: ModelLoadError: --eplb-algorithm auto: model.layers.0" in caplog.text


def test_an_expert_that_cannot_be_read_ends_the_engine() -> None:
    """A refusal would leave this rank alone with its experts, so it is none."""
    rebalancer, layers = made(Reversed())
    layers[1].can_read = False
    step(rebalancer, layers)
    step(rebalancer, layers)
    with pytest.raises(RuntimeError, match="experts could not be moved: the checkpoint is gone"):
        step(rebalancer, layers)


def test_layers_of_weights_that_serve_no_more_are_forgotten() -> None:
    rebalancer, layers = made(Reversed(), eplb_rebalance_layers_per_chunk=1)
    for _ in range(3):
        step(rebalancer, layers)
    rebalancer.serve(made(Reversed())[0]._placement)
    step(rebalancer, layers)
    assert [layer.slots for layer in layers] == [(3, 1, 2, 0), (0, 1, 2, 3), (0, 1, 2, 3)]
    assert rebalancer.told()["num_waiting_layers"] == 0


@pytest.mark.parametrize(("ranks", "nodes", "seen"), [(4, 2, 2), (4, 1, 1), (2, 4, 1)])
def test_the_algorithm_knows_the_machines(ranks: int, nodes: int, seen: int) -> None:
    """Two groups of ranks over four machines share their experts across machines: these count as one."""
    shape = ModelPlacement(ExpertPlacementOptions(), None, None, 1, ranks, num_nodes=nodes).shape("m", Routing(8, 2))
    assert (shape.num_ranks, shape.num_nodes) == (ranks, seen)


def test_trivial_slots_begin_again_after_the_last_expert() -> None:
    placement = ModelPlacement(ExpertPlacementOptions(ep_num_redundant_experts=4), None, None, 1, 2)
    shape = placement.shape("m", Routing(6, 2))
    assert shape == PlacementShape(6, 10, 2)
    assert list(placement.slots("m", shape)) == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    with pytest.raises(ModelLoadError, match=r"5 experts and --ep-num-redundant-experts 4 do not .*: add 1 more"):
        placement.shape("m", Routing(5, 2))
