"""top_k, top_p and min_p: which tokens are likely enough to be picked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.device import Upload
from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.unchanged import Unchanged
from fwk_sampling.processors.cutoff import Cutoff


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request keeps, each field at a value that really cuts something, or off."""

    top_k: int  # 0: off
    top_p: float  # 1: off
    min_logit: float  # ln(min_p); -inf: off


class LimitArrays(NamedTuple):
    """``Limits`` of several: [n] each."""

    top_k: np.ndarray  # int64
    top_p: np.ndarray  # float64
    min_logit: np.ndarray  # float64

    def of(self, places: np.ndarray) -> LimitArrays:
        """Those of some of them."""
        return LimitArrays(*(x[places] for x in self))


class Truncation(LogitsProcessor):
    """Keeps a row's entries from a cutoff up and sets the others to -inf, in the order of vLLM and transformers:

    - ``top_k``: the k-th largest logit and all above it;
    - ``top_p``: of these, the most likely until their share of what ``top_k`` left reaches ``top_p``
      (Holtzman et al. 2020, nucleus sampling);
    - ``min_p``: of these, those at least ``min_p`` times as likely as the most likely one (Nguyen et al. 2024).

    Equal logits share one fate: entries that tie with the last one kept are kept too, so the outcome is a matter of
    the logits alone and never of a sort's whim. Limits that leave room for one token (top_k 1, min_p 1, a top_p that
    the most likely one holds alone) leave one, of equals the first. Greedy rows are left alone.

    Each limit is a cutoff on the logits and the highest one decides. A row that holds NaN or +inf is left as it is:
    the sampler refuses it.
    """

    reads_history = False
    reads_places = False

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._asks = np.zeros(context.num_slots, bool)
        self._limits = LimitArrays(*(np.zeros(context.num_slots, t) for t in (np.int64, np.float64, np.float64)))
        self._cutoff = Cutoff(context.vocab_size)
        self._kept = [Unchanged(context.send) for _ in range(1 + len(LimitArrays._fields))]

    def add(self, slot: int, params: SamplingParams) -> bool:
        top_k = params.top_k if 0 < params.top_k < self.context.vocab_size else 0
        limits = Limits(top_k, min(params.top_p, 1.0), math.log(params.min_p) if params.min_p > 0 else -math.inf)
        if params.temperature == 0.0 or limits == Limits(0, 1.0, -math.inf):
            return False
        self._asks[slot] = True
        self._limits.top_k[slot], self._limits.top_p[slot] = limits.top_k, limits.top_p
        self._limits.min_logit[slot] = limits.min_logit
        return True

    def remove(self, slot: int) -> None:
        self._asks[slot] = False

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        rows = np.flatnonzero(self._asks[view.slots])
        limits = self._limits.of(view.slots[rows])
        if not logits.is_cpu:
            return truncate_batch(logits, rows, limits, [kept.send for kept in self._kept])
        table = logits.numpy()
        with np.errstate(over="ignore"):  # logits further apart than float32 reaches differ by inf
            for row, k, p, min_logit in zip(rows.tolist(), *(x.tolist() for x in limits), strict=True):
                lowest = self._cutoff.lowest_kept(table[row], k, p, min_logit)
                others = self._cutoff.other_largest(table[row], lowest, k, p, min_logit)
                table[row, others] = -np.inf
                # threshold_ keeps what is strictly greater (and NaN), in one pass at memory speed.
                torch.threshold_(logits[row], float(np.nextafter(lowest, np.float32(-np.inf))), -math.inf)
        return logits


def truncate_batch(
    logits: Tensor, rows: np.ndarray, limits: LimitArrays, sends: Sequence[Upload] = (torch.from_numpy,) * 4
) -> Tensor:
    """The same by one sort of all rows: what suits a GPU.

    Masses are counted in units of 2**-40 of the largest one: integers, so that no order of summation, and hence no
    batch, changes a cutoff.

    logits: [num_rows, vocab_size] float32, edited in place in ``rows`` [n] int64 only, which have these limits, [n]
    each. sends: what brings the rows and each of the limits to the device.
    """
    send_rows, *send_each = sends
    index = send_rows(rows)
    asked = logits[index]
    top_k = np.where(limits.top_k > 0, limits.top_k, asked.shape[1])
    limits = LimitArrays(top_k, limits.top_p, limits.min_logit.astype(np.float32))
    k, p, min_logits = (send(x[:, None]) for send, x in zip(send_each, limits, strict=True))
    ordered = asked.sort(dim=1, descending=True).values
    lowest = ordered.gather(1, k - 1)
    mass = (ordered.double() - ordered[:, :1]).exp_().masked_fill_(ordered < lowest, 0.0)
    mass = mass.mul_(2.0**40).nan_to_num_(0.0).long()
    upto = mass.cumsum(1)  # the mass of an entry and of the more likely ones
    num_kept = (upto - mass < p * upto[:, -1:]).sum(1, keepdim=True).clamp_(min=1)
    lowest_p = ordered.gather(1, num_kept - 1).masked_fill_(p >= 1.0, -math.inf)
    lowest = torch.maximum(torch.maximum(lowest, lowest_p), ordered[:, :1] + min_logits)
    is_one = (k == 1) | (min_logits >= 0.0) | ((p < 1.0) & (num_kept == 1))
    others = torch.arange(asked.shape[1], device=asked.device) != asked.argmax(1, keepdim=True)
    is_cut = (asked < lowest) | (is_one & others & torch.isfinite(ordered[:, :1]))
    logits[index] = asked.masked_fill_(is_cut, -math.inf)
    return logits
