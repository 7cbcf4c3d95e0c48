"""The engine with the fewest open sequences; of equals, the first."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.interfaces.balance import LoadBalancer, Replica
from fwk.types import Request


class MineBalancer(LoadBalancer):
    """No state: ``num_open`` is counted by the server."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: replica.num_open)
