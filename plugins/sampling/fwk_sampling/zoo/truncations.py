"""Typical-p, top-n-sigma and top-a: which tokens a row keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows


class TopNSigma(LogitsProcessor):
    """Keeps logits of at least ``max - n * sigma``, sigma the standard deviation of the finite logits.

    Tang et al. 2024, "Top-nsigma: Not All Logits Are You Need", algorithm 1. What is kept does not depend on the
    temperature.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._n: dict[int, float] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        n = params.extra.get("top_n_sigma", -1.0)
        if n <= 0 or params.temperature == 0.0:
            return False
        self._n[slot] = n
        return True

    def remove(self, slot: int) -> None:
        del self._n[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, n in asked_rows(self._n, view):
            scores = logits[row]
            finite = scores[scores != -torch.inf]
            lowest = finite.max() - n * finite.std(correction=0)
            scores.masked_fill_(scores < lowest, -torch.inf)
        return logits


class Typical(LogitsProcessor):
    """Keeps the tokens whose information is nearest to the entropy until their mass reaches ``typical_p``.

    Meister et al. 2023, "Locally Typical Sampling", section 4. Tokens as near as the last one that is kept are kept
    too, so that no sort decides between equals.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._mass: dict[int, float] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        mass = params.extra.get("typical_p", 1.0)
        if mass >= 1.0 or params.temperature == 0.0:
            return False
        self._mass[slot] = mass
        return True

    def remove(self, slot: int) -> None:
        del self._mass[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, mass in asked_rows(self._mass, view):
            scores = logits[row]
            log_p = scores.double().log_softmax(-1)
            p = log_p.exp()
            entropy = -(p * log_p).nan_to_num(0.0).sum()  # 0 * log 0 is 0
            distance = (-log_p - entropy).abs()
            ordered, order = distance.sort()
            above = p[order].cumsum(0) - p[order]
            last = ordered[(above < mass).sum().clamp(min=1) - 1]
            scores.masked_fill_(distance > last, -torch.inf)
        return logits


class TopA(LogitsProcessor):
    """Keeps tokens of a probability of at least ``top_a * p_max ** 2`` (KoboldAI's sampler of that name)."""

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._a: dict[int, float] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        a = params.extra.get("top_a", 0.0)
        if a == 0.0 or params.temperature == 0.0:
            return False
        self._a[slot] = a
        return True

    def remove(self, slot: int) -> None:
        del self._a[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, a in asked_rows(self._a, view):
            scores = logits[row]
            p = scores.double().softmax(-1)
            scores.masked_fill_(p < a * p.max() ** 2, -torch.inf)
        return logits
