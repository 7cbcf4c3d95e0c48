"""What samplers that temper and truncate themselves keep of each slot: a row of numbers for a kernel."""

from __future__ import annotations

import math

import numpy as np

from fwk.interfaces.sampling import SamplingContext, SamplingRows
from fwk.types import SamplingParams
from fwk_sampling._common.uniform import uniform

SETTINGS = np.dtype(
    [
        ("draw", np.float64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_logit", np.float32),
        ("top_k", np.int32),
    ]
)
"""temperature 0: greedy; top_p 1, min_logit -inf and top_k 0: off."""

FINISHED = (0.0, 1.0, 1.0, -math.inf, 0)
"""Settings of a row that processors have dealt with: only the draw is left."""

LOWEST_TEMPERATURE = 1e-5
"""Below it the most likely token wins, of equals the first: there the division could overflow."""


def leaves_one(params: SamplingParams) -> bool:
    """Whether the temperature leaves no choice; a dynamic one counts from it, and leaves some."""
    return params.temperature < LOWEST_TEMPERATURE and not params.extra.get("dynatemp_range")


class SlotSettings:
    """The settings of all slots."""

    def __init__(self, context: SamplingContext) -> None:
        self._vocab_size = context.vocab_size
        self._settings = np.zeros(context.num_slots, SETTINGS)

    def add(self, slot: int, params: SamplingParams) -> None:
        """A sequence takes ``slot``."""
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        min_logit = math.log(params.min_p) if params.min_p > 0 else -math.inf
        temperature = 0.0 if leaves_one(params) else max(params.temperature, LOWEST_TEMPERATURE)
        self._settings[slot] = (0.0, temperature, min(params.top_p, 1.0), min_logit, top_k)

    def of(self, rows: SamplingRows) -> np.ndarray:
        """[num_rows] ``SETTINGS``, with what each row draws where the host knows it."""
        if rows.unfinished is None:
            settings = np.full(len(rows.seeds), np.array(FINISHED, SETTINGS))
        else:
            settings = self._settings[rows.unfinished]
            settings[rows.unfinished < 0] = FINISHED
        settings["temperature"][rows.is_greedy] = 0.0
        if rows.num_fewer is None:
            settings["draw"] = uniform(rows.seeds, rows.positions)
        return settings
