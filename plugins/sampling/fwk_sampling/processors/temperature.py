"""Temperature."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.settings import LOWEST_TEMPERATURE, leaves_one
from fwk_sampling._common.unchanged import Unchanged


class Temperature(LogitsProcessor):
    """Divides the logits by ``temperature``; greedy rows (temperature 0) are left alone.

    A temperature near 0 leaves the most likely token alone, of equals the first.
    """

    reads_history = False
    reads_places = False

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._temperatures = np.ones(context.num_slots, np.float32)
        """By slot: dividing by 1 changes nothing."""
        self._leaves_one = np.zeros(context.num_slots, bool)
        self._divisors = Unchanged(context.send)

    def add(self, slot: int, params: SamplingParams) -> bool:
        is_asked = params.temperature not in (0.0, 1.0)
        self._leaves_one[slot] = is_asked and leaves_one(params)
        divides = is_asked and not self._leaves_one[slot]
        self._temperatures[slot] = max(params.temperature, LOWEST_TEMPERATURE) if divides else 1.0
        return is_asked

    def remove(self, slot: int) -> None:
        self._temperatures[slot] = 1.0
        self._leaves_one[slot] = False

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        divisors = self._temperatures[view.slots]
        if len(sharp := np.flatnonzero(self._leaves_one[view.slots])):
            index = self.context.send(sharp)
            part = logits[index]
            first = part.argmax(1, keepdim=True)
            logits[index] = torch.full_like(part, -torch.inf).scatter_(1, first, part.gather(1, first))
        asked = np.flatnonzero(divisors != 1.0)
        if 2 * len(asked) < len(logits):
            for row, temperature in zip(asked.tolist(), divisors[asked].tolist(), strict=True):
                logits[row].div_(temperature)
            return logits
        return logits.div_(self._divisors.send(divisors[:, None]))
