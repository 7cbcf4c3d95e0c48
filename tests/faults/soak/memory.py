"""Resident memory over time, and how fast it grows."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import psutil

MB = 2**20


@dataclass(slots=True)
class Memory:
    """Samples of processes that play one role one after the other: the engine's are replaced when they die."""

    _samples: dict[int, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def note(self, process: psutil.Process, minute: int) -> None:
        """Take a sample, unless the process is gone."""
        try:
            self._samples[process.pid][minute].append(process.memory_info().rss / MB)
        except psutil.NoSuchProcess:
            return

    def lives(self) -> list[list[tuple[int, float]]]:
        """Of each process that lived for three minutes: the minutes, and the median MB of each.

        Its first minute does not count. Medians, for a request of 8 MB takes a hundred times that for a moment.
        """
        lives = [
            [(m, statistics.median(sizes)) for m, sizes in sorted(life.items())] for life in self._samples.values()
        ]
        return [life[1:] for life in lives if len(life) >= 3]

    @property
    def slope(self) -> float:
        """MB a minute: least squares with one slope for all lives and a level for each of them."""
        above, below = 0.0, 0.0
        for life in self.lives():
            minutes, megabytes = np.array(life).T
            minutes = minutes - minutes.mean()
            above += float(minutes @ (megabytes - megabytes.mean()))
            below += float(minutes @ minutes)
        if not below:
            raise ValueError("no process lived long enough after the warm-up: nothing was measured")
        return above / below

    @property
    def most(self) -> float:
        """The most resident MB ever seen of one process."""
        return max(size for life in self._samples.values() for sizes in life.values() for size in sizes)
