"""Temperature."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows

_LOWEST = 1e-5
"""Below it the most likely token always wins anyway, and the division could overflow."""


class Temperature(LogitsProcessor):
    """Divides the logits by ``temperature``; greedy rows (temperature 0) are left alone."""

    reads_history = False

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._temperatures: dict[int, float] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        if params.temperature in (0.0, 1.0):
            return False
        self._temperatures[slot] = max(params.temperature, _LOWEST)
        return True

    def remove(self, slot: int) -> None:
        del self._temperatures[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        asked = asked_rows(self._temperatures, view)
        if 2 * len(asked) < len(logits):
            for row, temperature in asked:
                logits[row].div_(temperature)
            return logits
        divisors = np.ones((len(logits), 1), np.float32)  # dividing by 1 changes nothing
        for row, temperature in asked:
            divisors[row] = temperature
        return logits.div_(self.context.send(divisors))
