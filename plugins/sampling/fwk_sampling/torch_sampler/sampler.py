"""Greedy picks, and random ones by inverse CDF."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.sampling import Sampler, SamplingContext, SamplingRows
from fwk_sampling._common.uniform import draws_of

_NUM_CLASSES = 512
"""Classes of token ids, equal modulo this number: first one of these is drawn, then a token in it."""

_SPARSE = 16
"""A row with fewer than one possible token in this many is drawn from these alone."""


class TorchSampler(Sampler):
    """The most likely token of greedy rows (of equals the first); one drawn by inverse CDF for the others.

    On a CPU each row is worked on by itself, with numpy, whose passes over one row cost less than torch's; so a pick
    cannot depend on the rest of the batch. Elsewhere all rows are done at once, in integers, whose sums are exact in
    any order.

    A row whose largest logit is NaN, +inf or -inf gets -1.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        num_padded = -(-context.vocab_size // _NUM_CLASSES) * _NUM_CLASSES
        self._mass = np.zeros(num_padded, np.float32)  # scratch; what is past the vocabulary stays 0

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if not logits.is_cpu:
            return sample_batch(logits, rows, self.context.send)
        table = logits.to(torch.float32).numpy()
        picked = table.argmax(axis=1)  # NaN counts as the largest
        top = table[np.arange(len(table)), picked]
        is_usable = np.isfinite(top)
        if not rows.all_greedy:
            draws = draws_of(rows, torch.from_numpy).numpy()
            with np.errstate(
                over="ignore"
            ):  # logits that lie further apart than float32 reaches: the difference is inf
                for row in np.flatnonzero(is_usable & ~rows.is_greedy).tolist():
                    picked[row] = self._draw(table[row], top[row], draws[row])
        picked[~is_usable] = -1
        return torch.from_numpy(picked)

    def _draw(self, row: np.ndarray, top: np.float32, draw: float) -> int:
        """Token id drawn from ``row`` [vocab_size] float32 whose largest entry ``top`` is finite."""
        is_possible = row > -np.inf
        if np.count_nonzero(is_possible) * _SPARSE < len(row):
            ids = is_possible.nonzero()[0]
            cdf = np.cumsum(np.exp(row[ids] - top), dtype=np.float64)
            return int(ids[_place(cdf, draw)[0]])
        mass = self._mass[: len(row)]
        np.subtract(row, top, out=mass)
        np.exp(mass, out=mass)
        by_class = self._mass.reshape(-1, _NUM_CLASSES)
        cdf = np.cumsum(by_class.sum(axis=0), dtype=np.float64)
        column, rest = _place(cdf, draw)
        cdf = np.cumsum(by_class[:, column], dtype=np.float64)
        return _place(cdf, rest)[0] * _NUM_CLASSES + column


def _place(cdf: np.ndarray, draw: float) -> tuple[int, float]:
    """The first place at which ``cdf`` [n] exceeds ``draw`` of its total, and how far into that place the draw falls.

    A place without mass does not raise the cdf, so it is never the first, not even at the ends: the target lies in
    [0, total).
    """
    target = min(draw * cdf[-1], np.nextafter(cdf[-1], 0.0))
    place = int(np.searchsorted(cdf, target, side="right"))
    below = cdf[place - 1] if place else 0.0
    return place, (target - below) / (cdf[place] - below)


def sample_batch(logits: Tensor, rows: SamplingRows, send: Callable[[np.ndarray], Tensor] = torch.from_numpy) -> Tensor:
    """The same for all rows at once: what suits a GPU.

    send: brings an array to the device, where the host waits for nothing.

    Probabilities are counted in units of 2**-40 of the largest one: integers, so that no order of summation, and
    hence no batch, changes a pick.
    """
    if rows.all_greedy:
        top, picked = logits.max(dim=1)
        return picked.masked_fill_((top - top) != 0, -1)  # NaN where the largest is no finite number
    logits = logits.float()
    top, picked = logits.max(dim=1, keepdim=True)
    draws = draws_of(rows, send).unsqueeze(1)
    cdf = (logits - top).exp_().double().mul_(2.0**40).nan_to_num_(0.0).long().cumsum_(1)
    total = cdf[:, -1:]
    target = torch.minimum((draws * total).long(), total - 1)
    drawn = torch.searchsorted(cdf, target, right=True)
    if rows.is_greedy.any():
        drawn = torch.where(send(rows.is_greedy).unsqueeze(1), picked, drawn)
    return drawn.masked_fill_((top - top) != 0, -1).squeeze(1)
