"""One after the other."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.types import Request


class RoundRobin(LoadBalancer):
    """The next replica after the one chosen last; those that cannot serve are passed over."""

    def __init__(self, context: BalanceContext) -> None:
        super().__init__(context)
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        chosen = next((replica for replica in replicas if replica.index >= self._next), replicas[0])
        self._next = chosen.index + 1
        return chosen
