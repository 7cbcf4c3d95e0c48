"""Temperature."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.unchanged import Unchanged

_LOWEST = 1e-5
"""Below it the most likely token always wins anyway, and the division could overflow."""


class Temperature(LogitsProcessor):
    """Divides the logits by ``temperature``; greedy rows (temperature 0) are left alone."""

    reads_history = False
    reads_places = False

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._temperatures = np.ones(context.num_slots, np.float32)
        """By slot: dividing by 1 changes nothing."""
        self._divisors = Unchanged(context.send)

    def add(self, slot: int, params: SamplingParams) -> bool:
        is_asked = params.temperature not in (0.0, 1.0)
        self._temperatures[slot] = max(params.temperature, _LOWEST) if is_asked else 1.0
        return is_asked

    def remove(self, slot: int) -> None:
        self._temperatures[slot] = 1.0

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        divisors = self._temperatures[view.slots]
        asked = np.flatnonzero(divisors != 1.0)
        if 2 * len(asked) < len(logits):
            for row, temperature in zip(asked.tolist(), divisors[asked].tolist(), strict=True):
                logits[row].div_(temperature)
            return logits
        return logits.div_(self._divisors.send(divisors[:, None]))
