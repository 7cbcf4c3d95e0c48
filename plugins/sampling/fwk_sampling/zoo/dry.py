"""DRY: don't repeat yourself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows

_MAX_LENGTH = 128
"""Longer repetitions count as this long: the penalty is beyond any logit by then."""


@dataclass(frozen=True, slots=True)
class _Settings:
    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: np.ndarray  # [n] int32: tokens whose text holds a sequence breaker


class Dry(LogitsProcessor):
    """Subtracts ``multiplier * base ** (length - allowed_length)`` from tokens that prolong a repetition.

    p-e-w 2024 (text-generation-webui #5677), as llama.cpp has it: ``length`` is the longest run at the text's end that
    also stands before an earlier occurrence of the token, no run goes across a token whose text holds one of
    ``dry_sequence_breakers``, and such tokens are not penalised.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._settings: dict[int, _Settings] = {}
        self._breakers: dict[tuple[str, ...], np.ndarray] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        extra = params.extra
        last_n = extra.get("dry_penalty_last_n", -1)
        if extra.get("dry_multiplier", 0.0) == 0.0 or last_n == 0:
            return False
        breakers = tuple(extra.get("dry_sequence_breakers", ("\n", ":", '"', "*")))
        self._settings[slot] = _Settings(
            extra["dry_multiplier"],
            extra.get("dry_base", 1.75),
            extra.get("dry_allowed_length", 2),
            last_n,
            self._breaking(breakers),
        )
        return True

    def remove(self, slot: int) -> None:
        del self._settings[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, settings in asked_rows(self._settings, view):
            tokens = view.token_ids[view.slots[row], : view.num_tokens[row]]
            if settings.last_n > 0:
                tokens = tokens[-settings.last_n :]
            lengths = run_lengths(tokens, settings.breakers)
            at = np.flatnonzero(lengths >= settings.allowed_length)
            if not len(at):
                continue
            longest = np.zeros(logits.shape[1], np.int64)
            np.maximum.at(longest, tokens[at], lengths[at])
            longest[settings.breakers] = 0
            ids = np.flatnonzero(longest)
            penalty = settings.multiplier * settings.base ** (longest[ids] - settings.allowed_length).astype(np.float64)
            amounts = np.minimum(penalty, 1e30).astype(np.float32)
            logits[row, self.context.send(ids)] -= self.context.send(amounts)
        return logits

    def _breaking(self, breakers: tuple[str, ...]) -> np.ndarray:
        """[n] int32: the tokens whose text holds one of the breakers. Looked up once for each list."""
        found = self._breakers.get(breakers)
        if found is None:
            parts = [text.encode() for text in breakers if text]
            texts = self.context.token_bytes() if parts else []
            ids = [i for i, text in enumerate(texts) if any(part in text for part in parts)]
            if len(self._breakers) >= 16:  # a client may send another list with each request
                self._breakers.clear()
            found = self._breakers[breakers] = np.array(ids, np.int32)
        return found


def run_lengths(tokens: np.ndarray, breakers: np.ndarray) -> np.ndarray:
    """[n] int64: of the tokens before place i, how many in a row equal the text's last ones; at most ``_MAX_LENGTH``.

    tokens: [n] int32. A run ends at a breaker. O(n * length of the longest run).
    """
    count = len(tokens)
    lengths = np.zeros(count, np.int64)
    if count < 2:
        return lengths
    alive = np.arange(1, count)
    for length in range(min(_MAX_LENGTH, count - 1)):
        last = tokens[count - 1 - length]
        if np.any(breakers == last):
            break
        alive = alive[alive > length]
        alive = alive[tokens[alive - 1 - length] == last]
        if not len(alive):
            break
        lengths[alive] += 1
    return lengths
