"""Numbers that are cheap to change from the event loop and safe to read from another thread.

prometheus-client's own metrics take a lock for every change; here there is one writer, and a reader that sees a value a
moment old is right enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.utils import floatToGoString


class Histogram:
    """Counts of observations by upper bound, with their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``; a clock that went backwards counts as no time."""
        value = max(value, 0.0)
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by bound, and the sum."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*self._bounds, float("inf")], list(self._counts), strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        return buckets, self._sum


class Growing:
    """A counter fed from readings of another one, which starts again from 0 when its process does."""

    def __init__(self) -> None:
        self.total: float = 0
        self._last: float = 0

    def reading(self, value: float) -> None:
        """Add what has come since the last reading; after a restart, everything."""
        self.total += value - self._last if value >= self._last else value
        self._last = value
