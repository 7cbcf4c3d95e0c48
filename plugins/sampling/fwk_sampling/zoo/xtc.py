"""XTC: exclude top choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows
from fwk_sampling._common.uniform import uniform

_STREAM = np.uint64(0xD6E8FEB86659FD93)
"""Keeps XTC's draws apart from the sampler's for the same seed and position."""


@dataclass(frozen=True, slots=True)
class _Settings:
    probability: float
    threshold: float


class Xtc(LogitsProcessor):
    """With ``xtc_probability``, excludes all tokens of at least ``xtc_threshold`` but the least probable of them.

    As in text-generation-webui (p-e-w 2024) and llama.cpp. Whether it acts is drawn from the sequence's seed and the
    position, so a seed gives the same text alone and in any batch. Nothing happens while fewer than two tokens reach
    the threshold.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._settings: dict[int, _Settings] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        settings = _Settings(params.extra.get("xtc_probability", 0.0), params.extra.get("xtc_threshold", 0.1))
        if settings.probability == 0.0 or settings.threshold > 0.5 or params.temperature == 0.0:
            return False
        self._settings[slot] = settings
        return True

    def remove(self, slot: int) -> None:
        del self._settings[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        assert view.seeds is not None
        with np.errstate(over="ignore"):
            draws = uniform(view.seeds + _STREAM, view.num_tokens)
        for row, settings in asked_rows(self._settings, view):
            if draws[row] >= settings.probability:
                continue
            scores = logits[row]
            p = scores.double().softmax(-1)
            probable = p >= settings.threshold
            if int(probable.sum()) >= 2:
                scores.masked_fill_(probable & (p > p[probable].min()), -torch.inf)
        return logits
