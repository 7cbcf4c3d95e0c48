"""Replicas that come back get their share of requests little by little, as load balancers do it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

MIN_WEIGHT = 0.1
"""Of a replica that has just come back: the share of requests for which the load balancer may choose it."""


class SlowStart:
    """Whom the load balancer may choose from, of the replicas that can serve.

    One that could not serve and can again has an empty queue and a cold prefix cache, and may soon fail again: it is
    offered for a tenth of the requests at once, and for all of them ``seconds`` later. ``seconds`` 0: at once for all.
    """

    def __init__(self, num_replicas: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._is_out = [False] * num_replicas
        self._since: list[float | None] = [None] * num_replicas  # of those that come back
        self._credit = [0.0] * num_replicas

    def weight(self, index: int) -> float:
        """Share of requests for which a replica is offered: 0 while it cannot serve, 1 once it is as the others."""
        if self._is_out[index]:
            return 0.0
        since = self._since[index]
        if since is None:
            return 1.0
        elapsed = self._clock() - since
        if elapsed >= self._seconds:
            self._since[index] = None
            return 1.0
        return max(MIN_WEIGHT, elapsed / self._seconds)

    def note(self, able: Sequence[bool]) -> None:
        """Which replicas can serve now, by index. Called with every request and every death."""
        for index, can_serve in enumerate(able):
            if can_serve and self._is_out[index]:
                self._since[index] = self._clock()
                self._credit[index] = 1.0 - MIN_WEIGHT  # the first request tries it
            self._is_out[index] = not can_serve

    def offered(self, able: Sequence[int]) -> list[int]:
        """Those of ``able``, by index, that are offered for one more request; all where that would be none."""
        offered: list[int] = []
        for index in able:
            self._credit[index] += self.weight(index)
            if self._credit[index] >= 1.0 or self._since[index] is None:
                self._credit[index] = max(0.0, self._credit[index] - 1.0)
                offered.append(index)
        return offered or list(able)
