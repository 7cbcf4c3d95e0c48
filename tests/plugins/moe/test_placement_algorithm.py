"""DeepSeek's placement of experts: its published example, and how near it comes to the best there is."""

from __future__ import annotations

import itertools
import random

import pytest

from fwk.interfaces.expert_placement import ExpertPlacerContext, PlacementShape
from fwk_moe.deepseek_placement.placer import DeepSeekPlacer, packed, replicated
from fwk_moe.expert_placement.rebalancer import kept_in_place, utilization

PLACER = DeepSeekPlacer(ExpertPlacerContext())

PUBLISHED = [
    (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    ),
    (
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ),
]
"""Two layers of github.com/deepseek-ai/EPLB's README: four groups of experts, two nodes of four ranks."""


def by_rank(slots: list[int], num_ranks: int) -> list[list[int]]:
    size = len(slots) // num_ranks
    return sorted(sorted(slots[first : first + size]) for first in range(0, len(slots), size))


@pytest.mark.parametrize(("loads", "slots"), PUBLISHED)
def test_the_published_example(loads: list[int], slots: list[int]) -> None:
    """Ranks hold the same, in whatever order; and the groups of each node are the same."""
    shape = PlacementShape(12, 16, 8, num_groups=4, num_nodes=2)
    found = PLACER.place(loads, shape)
    assert by_rank(found, 8) == by_rank(slots, 8)
    nodes = [{frozenset(part[:8]), frozenset(part[8:])} for part in (found, slots)]
    assert nodes[0] == nodes[1]


def skewed(seed: int, num_experts: int) -> list[int]:
    rng = random.Random(seed)
    return [int(1000 * rng.paretovariate(1.2)) for _ in range(num_experts)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_experts", "num_slots", "num_ranks"), [(64, 64, 8), (64, 80, 8), (256, 288, 32)])
def test_ranks_are_used_better_than_in_order(seed: int, num_experts: int, num_slots: int, num_ranks: int) -> None:
    loads, shape = skewed(seed, num_experts), PlacementShape(num_experts, num_slots, num_ranks)
    in_order = [slot % num_experts for slot in range(num_slots)]
    found = utilization(loads, PLACER.place(loads, shape), num_ranks)
    before = utilization(loads, in_order, num_ranks)
    assert found is not None
    assert before is not None
    assert found >= before
    assert num_slots == num_experts or found > 1.2 * before


def best(loads: list[float], num_packs: int) -> float:
    """The smallest largest sum of equally many items, of all ways to pack them."""
    room = len(loads) // num_packs
    if num_packs == 1:
        return sum(loads)
    first, rest = 0, range(1, len(loads))
    found = float("inf")
    for others in itertools.combinations(rest, room - 1):
        pack = {first, *others}
        left = [load for item, load in enumerate(loads) if item not in pack]
        found = min(found, max(sum(loads[item] for item in pack), best(left, num_packs - 1)))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_packing_is_within_a_third_of_the_best(seed: int) -> None:
    """The bound of Graham's rule, 4/3 - 1/(3m), which is proved for packs without a limit of items; of two it holds."""
    rng = random.Random(seed)
    loads = [float(rng.randint(1, 99)) for _ in range(8)]
    for num_packs in (2, 4):
        packs = packed(loads, num_packs)
        assert sorted(itertools.chain(*packs)) == list(range(8))
        assert {len(pack) for pack in packs} == {8 // num_packs}
        largest = max(sum(loads[item] for item in pack) for pack in packs)
        assert best(loads, num_packs) <= largest <= 4 / 3 * best(loads, num_packs)


@pytest.mark.parametrize("seed", range(30))
def test_replication_makes_the_largest_share_as_small_as_it_can_be(seed: int) -> None:
    """Against all ways to give three more slots."""
    rng = random.Random(seed)
    loads = [float(rng.randint(0, 99)) for _ in range(5)]
    held = replicated(loads, 8)

    def largest(more: tuple[int, ...]) -> float:
        return max(loads[i] / (1 + more.count(i)) for i in range(5))

    wanted = min(largest(more) for more in itertools.combinations_with_replacement(range(5), 3))
    assert max(loads[i] / held.count(i) for i in range(5)) == wanted


def test_without_tokens_replicas_are_spread() -> None:
    assert sorted(replicated([0.0] * 4, 8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_groups_that_do_not_divide_by_nodes_are_one() -> None:
    loads = skewed(3, 12)
    apart = PLACER.place(loads, PlacementShape(12, 16, 4, num_groups=3, num_nodes=2))
    assert apart == PLACER.place(loads, PlacementShape(12, 16, 4))


def test_utilization() -> None:
    assert utilization([4, 4, 4, 4], [0, 1, 2, 3], 2) == 1.0
    assert utilization([12, 0, 2, 2], [0, 1, 2, 3], 2) == pytest.approx(8 / 12)
    assert utilization([12, 0, 2, 2], [0, 1, 0, 2, 3, 0], 3) == pytest.approx(16 / 3 / 6)
    assert utilization([0, 0], [0, 1], 2) is None


def test_experts_that_stay_on_a_rank_stay_where_they_are() -> None:
    assert kept_in_place([3, 0, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5], 2) == [0, 1, 3, 2, 4, 5]
    assert kept_in_place([0, 1], [0, 0], 1) == [0, 1]
    assert kept_in_place([1, 1, 0, 2], [0, 1, 2, 1], 2) == [1, 1, 2, 0]
