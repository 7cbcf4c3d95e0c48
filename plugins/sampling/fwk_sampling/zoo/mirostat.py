"""Mirostat: a truncation steered so that picked tokens are as surprising as was asked for."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows

NUM_FITTED = 100
"""Probable tokens that version 1 fits Zipf's law to; the paper's m."""

NUM_LEFT = 1024
"""Sequences that left their slot whose state is kept: one that was pre-empted comes back."""


@dataclass(slots=True)
class _State:
    """Where a sequence stands; surprises are in bits."""

    version: int
    tau: float
    rate: float
    temperature: float
    bound: float  # the paper's mu
    depth: int = -1  # tokens before the position that ``bound`` is for; -1: not seen yet
    surprises: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """[vocab_size] of each position of the step under way, after truncation."""
    text: hashlib.blake2b = field(default_factory=hashlib.blake2b)  # the tokens up to ``depth``

    def key(self) -> bytes:
        """Of the text so far and the settings: ``bound`` is a function of these."""
        text = self.text.copy()
        text.update(f" {self.version} {self.tau} {self.rate} {self.temperature}".encode())
        return text.digest()

    def advance(self, token_ids: Sequence[int]) -> float:
        """The bound after these tokens."""
        bound = self.bound
        for depth, token_id in enumerate(token_ids, self.depth):
            if depth in self.surprises and token_id >= 0:
                surprise = float(self.surprises[depth][token_id])
                if math.isfinite(surprise):  # a draft that will not stand may be one that is cut off
                    bound -= self.rate * (surprise - self.tau)
        return bound


class Mirostat(LogitsProcessor):
    """Keeps the tokens of a surprise up to a bound that follows how surprising the picked ones were.

    Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity", algorithm 1
    (version 1: top-k with a k from Zipf's exponent) and its shorter form (version 2: a bound of the surprise itself);
    the surprise of a pick is that in the truncated distribution at ``temperature``, as in llama.cpp.

    A row behind drafts is truncated by the bound that these would lead to; only tokens that stand move it.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._states: dict[int, _State] = {}
        self._left: OrderedDict[bytes, float] = OrderedDict()

    def add(self, slot: int, params: SamplingParams) -> bool:
        version = params.extra.get("mirostat", 0)
        if version == 0 or params.temperature == 0.0:
            return False
        tau = params.extra.get("mirostat_tau", 5.0)
        rate = params.extra.get("mirostat_eta", 0.1)
        self._states[slot] = _State(version, tau, rate, max(params.temperature, 1e-5), bound=2 * tau)
        return True

    def remove(self, slot: int) -> None:
        state = self._states.pop(slot)
        if state.depth >= 0:
            self._left[state.key()] = state.bound
            while len(self._left) > NUM_LEFT:
                self._left.popitem(last=False)

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, state in asked_rows(self._states, view):
            slot, depth = int(view.slots[row]), int(view.num_tokens[row])
            if state.depth < 0:
                self._meet(state, view.token_ids[slot, :depth])
            bound = state.advance(view.token_ids[slot, state.depth : depth].tolist())
            state.surprises[depth] = _truncate(logits[row], state, bound)
        return logits

    def ends(self, slot: int, token_ids: Sequence[int]) -> int | None:
        state = self._states[slot]
        state.bound = state.advance(token_ids)
        state.depth += len(token_ids)
        state.text.update(np.array(token_ids, np.int32).tobytes())
        state.surprises.clear()
        return None

    def _meet(self, state: _State, token_ids: np.ndarray) -> None:
        """A sequence's first row here: it is new, or has come back."""
        state.depth = len(token_ids)
        state.text.update(token_ids.astype(np.int32, copy=False).tobytes())
        state.bound = self._left.pop(state.key(), state.bound)


def _truncate(scores: Tensor, state: _State, bound: float) -> Tensor:
    """Cut a row's tokens off in place; returns the surprise of each in what is left: [vocab_size], inf where cut."""
    surprise = (scores.double() / state.temperature).log_softmax(-1).div_(-math.log(2.0))
    if state.version == 1:
        highest = surprise.kthvalue(_num_kept(surprise, bound)).values
    else:
        highest = torch.clamp(surprise.min(), min=bound)
    cut = surprise > highest
    scores.masked_fill_(cut, -torch.inf)
    mass = torch.exp2(-surprise).masked_fill_(cut, 0.0).sum()
    return (surprise + mass.log2()).masked_fill_(cut, torch.inf).float()


def _num_kept(surprise: Tensor, bound: float) -> int:
    """The paper's equation 2: k of Zipf's law, whose exponent the most probable tokens tell."""
    size = len(surprise)
    top = surprise.topk(min(NUM_FITTED, size), largest=False).values
    top = top[top.isfinite()]
    if len(top) < 2:
        return 1
    ranks = torch.arange(1, len(top) + 1, dtype=torch.float64, device=top.device).log()
    steps = ranks.diff()
    exponent = float((steps * top.diff()).sum() * math.log(2.0) / (steps * steps).sum())
    epsilon = exponent - 1.0
    try:
        k = (epsilon * 2.0**bound / (1.0 - size**-epsilon)) ** (1.0 / exponent)
    except (ZeroDivisionError, OverflowError):
        return size
    return min(max(int(k), 1), size) if math.isfinite(k) else size
