"""A watermark in the choice of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows

HASH_KEY = 15_485_863
"""The key of the paper's reference implementation: the millionth prime."""


@dataclass(frozen=True, slots=True)
class _Settings:
    gamma: float
    delta: float


class Watermark(LogitsProcessor):
    """Adds ``delta`` to the logits of a share ``gamma`` of the vocabulary, which the token before chooses.

    Kirchenbauer et al. 2023, "A Watermark for Large Language Models", algorithm 2. ``favoured`` is all that a detector
    needs: of a text of n tokens, gamma * n are favoured by chance, with a variance of n * gamma * (1 - gamma).
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._settings: dict[int, _Settings] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        if not params.extra.get("watermark", False):
            return False
        gamma, delta = params.extra.get("watermark_gamma", 0.5), params.extra.get("watermark_delta", 2.0)
        self._settings[slot] = _Settings(gamma, delta)
        return True

    def remove(self, slot: int) -> None:
        del self._settings[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, settings in asked_rows(self._settings, view):
            before = int(view.token_ids[view.slots[row], view.num_tokens[row] - 1])
            ids = self.context.send(favoured(before, logits.shape[1], settings.gamma))
            logits[row, ids] += settings.delta
        return logits


def favoured(token_id: int, vocab_size: int, gamma: float) -> np.ndarray:
    """[int(gamma * vocab_size)] int64: the tokens favoured after ``token_id``."""
    order = np.random.Generator(np.random.PCG64(HASH_KEY * (token_id + 1))).permutation(vocab_size)
    return order[: int(gamma * vocab_size)]
