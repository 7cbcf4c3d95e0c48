"""Replication and balanced packing, both greedy.

The algorithm is that of DeepSeek's EPLB (github.com/deepseek-ai/EPLB, 2025; DeepSeek-V3 Technical Report,
arXiv:2412.19437, section 3.4): groups of experts are packed to nodes, experts replicated within each node, and replicas
packed to the ranks of the node. Where groups do not divide by nodes, all ranks count as one node and experts as one
group.
"""

from __future__ import annotations

from collections.abc import Sequence

from fwk.interfaces.expert_placement import ExpertPlacer, PlacementShape


class DeepSeekPlacer(ExpertPlacer):
    """Keeps nothing between calls."""

    def place(self, loads: Sequence[int], shape: PlacementShape) -> list[int]:
        num_groups, num_nodes = shape.num_groups, shape.num_nodes
        if num_groups % num_nodes or shape.num_experts % num_groups:
            num_groups, num_nodes = 1, 1
        size = shape.num_experts // num_groups
        groups = [sum(loads[first : first + size]) for first in range(0, shape.num_experts, size)]
        slots: list[int] = []
        for node in packed(groups, num_nodes):
            experts = [group * size + i for group in node for i in range(size)]
            held = replicated([loads[expert] for expert in experts], shape.num_slots // num_nodes)
            each = [loads[experts[i]] / held.count(i) for i in held]
            for rank in packed(each, shape.num_ranks // num_nodes):
                slots += [experts[held[replica]] for replica in rank]
        return slots


def replicated(loads: Sequence[float], num_slots: int) -> list[int]:
    """Every item once, and then again and again the one whose replicas have most to do each: [num_slots] indices.

    Of equals, the one with the fewest replicas, and then the first.
    """
    counts = [1] * len(loads)
    held = list(range(len(loads)))
    while len(held) < num_slots:
        item = max(range(len(loads)), key=lambda i: (loads[i] / counts[i], -counts[i]))
        counts[item] += 1
        held.append(item)
    return held


def packed(loads: Sequence[float], num_packs: int) -> list[list[int]]:
    """Indices of the items of each pack, equally many in each: the heaviest first, to the lightest pack with room."""
    room = len(loads) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    sums = [0.0] * num_packs
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
        pack = min((p for p in range(num_packs) if len(packs[p]) < room), key=lambda p: sums[p])
        packs[pack].append(item)
        sums[pack] += loads[item]
    return packs
