"""A temperature that follows the entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows

_LOWEST = 1e-5
"""As the processor ``temperature`` has it: below, the most probable token wins anyway."""


@dataclass(frozen=True, slots=True)
class _Settings:
    temperature: float
    low: float
    high: float
    exponent: float


class DynamicTemperature(LogitsProcessor):
    """Replaces ``temperature`` T by ``low + (high - low) * (H / H_max) ** exponent``, from T - range to T + range.

    H is the entropy of the row's distribution and H_max that of equal chances for all tokens still allowed (llama.cpp's
    ``dynatemp_range``). As the processor ``temperature`` divides by T later, the logits are multiplied by T here.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._settings: dict[int, _Settings] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        spread, temperature = params.extra.get("dynatemp_range", 0.0), max(params.temperature, _LOWEST)
        if spread == 0.0 or params.temperature == 0.0:
            return False
        low = max(temperature - spread, _LOWEST)
        exponent = params.extra.get("dynatemp_exponent", 1.0)
        self._settings[slot] = _Settings(temperature, low, temperature + spread, exponent)
        return True

    def remove(self, slot: int) -> None:
        del self._settings[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, settings in asked_rows(self._settings, view):
            log_p = logits[row].double().log_softmax(-1)
            count = int(log_p.isfinite().sum())
            if count < 2:
                continue
            entropy = float(-(log_p.exp() * log_p).nan_to_num(0.0).sum())
            share = min(entropy / math.log(count), 1.0) ** settings.exponent
            logits[row] *= settings.temperature / (settings.low + (settings.high - settings.low) * share)
        return logits
