"""Bias and masks that follow from the request alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows, entries, forbid, require_token


class LogitBias(LogitsProcessor):
    """Adds the request's bias (OpenAI's ``logit_bias``): -100 all but forbids a token, it does not mask it."""

    reads_history = False
    reads_places = False

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # slot -> ids [n] int64, values [n] float32

    def add(self, slot: int, params: SamplingParams) -> bool:
        if not params.logit_bias:
            return False
        ids = np.array(list(params.logit_bias), np.int64)
        self._bias[slot] = ids, np.array(list(params.logit_bias.values()), np.float32)
        return True

    def remove(self, slot: int) -> None:
        del self._bias[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        asked = asked_rows(self._bias, view)
        index = entries([(row, ids) for row, (ids, _) in asked], self.context)
        logits[index] += self.context.send(np.concatenate([values for _, (_, values) in asked]))
        return logits


class MinTokens(LogitsProcessor):
    """Forbids the tokens that would end the text until ``min_tokens`` have been generated.

    Those are ``stop_token_ids`` and, unless ``ignore_eos`` says that they end nothing, the model's own.
    """

    reads_history = False

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._settings: dict[int, tuple[int, np.ndarray]] = {}  # slot -> min_tokens, ids [n] int64
        self._eos = [token_id for token_id in context.eos_token_ids if token_id < context.vocab_size]

    def add(self, slot: int, params: SamplingParams) -> bool:
        ids = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos)]
        if params.min_tokens <= 0 or not ids:
            return False
        self._settings[slot] = params.min_tokens, np.array(ids, np.int64)
        return True

    def remove(self, slot: int) -> None:
        del self._settings[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        num_generated = (view.num_tokens - view.num_prompt_tokens).tolist()
        asked = asked_rows(self._settings, view)
        parts = [(row, ids) for row, (min_tokens, ids) in asked if num_generated[row] < min_tokens]
        if parts:
            forbid(logits, parts, view, "min_tokens", self.context)
        return logits


class AllowedTokenIds(LogitsProcessor):
    """Forbids every token but the listed ones. Comes after the other masks, to see whether any of them is left."""

    reads_history = False
    reads_places = False

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._ids: dict[int, Tensor] = {}  # slot -> [n] int64, on the device

    def add(self, slot: int, params: SamplingParams) -> bool:
        if params.allowed_token_ids is None:
            return False
        self._ids[slot] = self.context.send(np.array(params.allowed_token_ids, np.int64))
        return True

    def remove(self, slot: int) -> None:
        del self._ids[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        asked = asked_rows(self._ids, view)
        for row, ids in asked:
            kept = logits[row, ids]
            logits[row].fill_(-torch.inf).index_copy_(0, ids, kept)
        require_token(logits, [row for row, _ in asked], view, "allowed_token_ids", self.context)
        return logits
