"""Picks by one uniform number a row: the first token at which the sum of probabilities exceeds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fwk.interfaces.sampling import Sampler, SamplingRows

if TYPE_CHECKING:
    from torch import Tensor


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) from seed and position alone (the finaliser of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = seeds * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


class MineSampler(Sampler):
    """No state: a pick depends on its row, seed and position."""

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if not len(logits):
            return torch.zeros(0, dtype=torch.int64)
        largest = logits.max(-1).values
        is_broken = logits.isnan().any(-1) | ~largest.isfinite()
        sums = (logits.double() - largest[:, None]).exp().nan_to_num(0.0).cumsum(-1)
        goal = torch.from_numpy(uniform(rows.seeds, rows.positions))[:, None] * sums[:, -1:]
        drawn = torch.searchsorted(sums, goal, right=True)[:, 0]
        picks = torch.where(torch.from_numpy(rows.is_greedy), logits.argmax(-1), drawn)
        return torch.where(is_broken, -1, picks)
