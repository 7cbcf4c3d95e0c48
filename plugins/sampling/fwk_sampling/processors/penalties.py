"""Penalties on tokens that the text already holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling.processors.counts import TokenCounts, has_texts_of_its_own

NOTHING = (1.0, 0.0, 0.0)


class Penalties(LogitsProcessor):
    """First ``repetition_penalty``, over prompt and output (Keskar et al. 2019, CTRL, section 4.1): positive logits
    are divided by it, negative ones multiplied. Then ``frequency_penalty`` times the number of occurrences, and
    ``presence_penalty`` once, over the output alone (OpenAI's definition).
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._penalties = np.tile(np.array(NOTHING, np.float64), (context.num_slots, 1))  # by slot, in the order above
        self._asks = np.zeros(context.num_slots, bool)
        self._counts = TokenCounts(context.num_slots)

    def add(self, slot: int, params: SamplingParams) -> bool:
        self._penalties[slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._counts.forget(slot)
        self._asks[slot] = bool((self._penalties[slot] != NOTHING).any())
        return bool(self._asks[slot])

    def remove(self, slot: int) -> None:
        self._asks[slot] = False

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        rows = np.flatnonzero(self._asks[view.slots])
        settings = self._penalties[view.slots[rows]]
        if not logits.is_cpu and len(rows) and not has_texts_of_its_own(view, rows):
            return self._apply_table(logits, view, rows, settings)
        owner, ids, counts = self._counts.of(view, rows, settings[:, 0] != 1.0)
        if not len(ids):
            return logits
        repetition, frequency, presence = settings.T
        amounts = np.where(counts > 0, frequency[owner] * counts + presence[owner], 0.0).astype(np.float32)
        send = self.context.send
        index = send(rows[owner]), send(ids)
        factors = send(repetition.astype(np.float32)[owner])
        values = logits[index]
        logits[index] = torch.where(values > 0, values / factors, values * factors) - send(amounts)
        return logits

    def _apply_table(self, logits: Tensor, view: LogitsView, rows: np.ndarray, settings: np.ndarray) -> Tensor:
        """The same for rows [n] with settings [n, 3] whose entries make a table: what suits a device."""
        ids, counts = self._counts.table(view, rows, settings[:, 0] != 1.0)
        if not ids.shape[1]:
            return logits
        repetition, frequency, presence = settings.T
        amounts = np.where(counts > 0, frequency[:, None] * counts + presence[:, None], 0.0).astype(np.float32)
        send = self.context.send
        index = send(rows[:, None]), send(ids.astype(np.int64))
        factors = send(repetition[:, None].astype(np.float32))
        values = logits[index]
        logits[index] = torch.where(values > 0, values / factors, values * factors) - send(amounts)  # repeats are equal
        return logits
