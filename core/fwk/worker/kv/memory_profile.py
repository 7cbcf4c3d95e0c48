"""What a run takes of a device's memory alongside weights and K/V: measured before the KV cache has its size."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fwk.interfaces.device import Device, MemoryInfo


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that the KV cache leaves free, or finds in use.

    others: in use before anything was loaded. step: of the largest step, for as long as it runs. graphs: of captured
    steps. On the host nothing is measured.
    """

    others: int = 0
    step: int = 0
    graphs: int = 0

    @property
    def reserved(self) -> int:
        """What has to be free next to the KV cache."""
        return self.step + self.graphs

    def sentence(self) -> str:
        """What has to stay free, to follow how much is free in a sentence; empty where nothing has to."""
        reserved = {"the largest step": self.step, "captured graphs": self.graphs}
        parts = [f"{size / 2**20:.0f} MiB for {what}" for what, size in reserved.items() if size]
        return f", of which {' and '.join(parts)} must stay free" if parts else ""


class MemoryProfile:
    """Measures, on a device that is not the host."""

    def __init__(self, device: Device, where: torch.device, memory: Callable[[], MemoryInfo]) -> None:
        self._device = device
        self._where = where
        self._memory = memory

    def most(self, run: Callable[[], Any]) -> int | None:
        """Bytes that the allocator takes for ``run`` while it runs and can give back; None where it counts none."""
        self.trim()
        run()
        peak = self._device.taken(self._where)
        self.trim()
        kept = self._device.taken(self._where)
        return None if peak is None or kept is None else max(0, peak.most - kept.now)

    def held(self, make: Callable[[], Any]) -> int:
        """Bytes that what ``make`` returns takes for as long as it is referenced."""
        made = make()
        self.trim()
        free = self._memory().free
        del made
        self.trim()
        return max(0, self._memory().free - free)

    def of_graphs(self, sizes: Sequence[int], capture: Callable[[Sequence[int]], Any]) -> int:
        """About what captures of all ``sizes`` take, smallest first, from those of the largest alone and of the two.

        capture: makes captures of some sizes, in memory of their own. The pool is as large as the largest step needs;
        each other size adds what it keeps, which is no more than what the second largest does.
        """
        if not sizes:
            return 0
        first = self.held(lambda: capture(sizes[-1:]))
        if len(sizes) == 1:
            return first
        both = self.held(lambda: capture(sizes[-2:]))
        return first + max(0, both - first) * (len(sizes) - 1)

    def trim(self) -> None:
        """Give back what no tensor uses."""
        gc.collect()
        self._device.trim(self._where)
