"""Smooth weighted round robin, as nginx has it, with weights that follow the engines' load."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.types import Request
from fwk_balancers.wrr import WeightedOptions

LEAST = 0.01
"""Of a full engine: it still has its turn now and then, for what it frees meanwhile."""


class WeightedRoundRobin(LoadBalancer):
    """Each replica earns its weight with every request; the one that has earned most serves it, and pays for all.

    So shares are proportional to the weights, and the turns of the heaviest are spread instead of coming in a row.
    """

    def __init__(self, context: BalanceContext) -> None:
        super().__init__(context)
        options: WeightedOptions = context.options or WeightedOptions()
        self._by_requests = options.rank_factor == "requests"
        self._max_usage = options.wrr_available_ratio / 100
        self._earned = [0.0] * context.num_replicas

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        candidates = [replica for replica in replicas if _usage(replica) < self._max_usage] or list(replicas)
        weights = {replica.index: self._weight(replica) for replica in candidates}
        for index, weight in weights.items():
            self._earned[index] += weight
        chosen = max(candidates, key=lambda replica: (self._earned[replica.index], -replica.index))
        self._earned[chosen.index] -= sum(weights.values())
        return chosen

    def _weight(self, replica: Replica) -> float:
        return 1 / (1 + replica.num_open) if self._by_requests else max(1 - _usage(replica), LEAST)


def _usage(replica: Replica) -> float:
    """Share of its KV cache's blocks that sequences hold."""
    stats = replica.stats
    return stats.num_held_blocks / stats.num_blocks if stats.num_blocks else 0.0
