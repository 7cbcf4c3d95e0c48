"""The fewest open sequences."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.types import Request


class ShortestQueue(LoadBalancer):
    """The replica with the fewest open sequences; of equals, the one that was not chosen for longest.

    What the server has sent is counted rather than what engines report: a burst that comes between two reports would
    all go to the same one.
    """

    def __init__(self, context: BalanceContext) -> None:
        super().__init__(context)
        self._chosen_at = [0] * context.num_replicas
        self._num_choices = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        chosen = min(replicas, key=lambda replica: (replica.num_open, self._chosen_at[replica.index]))
        self._num_choices += 1
        self._chosen_at[chosen.index] = self._num_choices
        return chosen
