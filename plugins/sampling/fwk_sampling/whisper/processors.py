"""Masks of tokens, and of timestamps by what the text has so far."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows, forbid, require_token


class SuppressTokens(LogitsProcessor):
    """Two lists of ids for each slot: those that are forbidden everywhere, and those that are at the beginning."""

    reads_history = False

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._ids: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # [n] int64 each

    def add(self, slot: int, params: SamplingParams) -> bool:
        given = [params.extra.get(f"{name}suppress_tokens") for name in ("", "begin_")]
        if not any(given):
            return False
        always, first = map(self._known, given)
        if not len(always) and not len(first):
            return False
        self._ids[slot] = always, np.union1d(always, first)
        return True

    def _known(self, ids: list[int] | None) -> np.ndarray:
        """What is no token is never chosen as it is."""
        return np.unique(np.array([i for i in ids or () if i < self.context.vocab_size], np.int64))

    def remove(self, slot: int) -> None:
        del self._ids[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        is_first = (view.num_tokens == view.num_prompt_tokens).tolist()
        parts = [(row, ids[is_first[row]]) for row, ids in asked_rows(self._ids, view)]
        parts = [(row, ids) for row, ids in parts if len(ids)]
        if parts:
            forbid(logits, parts, view, "suppress_tokens", self.context)
        return logits


class Timestamps(LogitsProcessor):
    """A text begins with a timestamp; one that ends a segment is followed by the next one's, which is no earlier."""

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._settings: dict[int, tuple[int, int]] = {}
        self._end = min(context.eos_token_ids, default=context.vocab_size)

    def add(self, slot: int, params: SamplingParams) -> bool:
        begin = params.extra.get("timestamp_begin", -1)
        if not 0 < begin < self.context.vocab_size:
            return False
        self._settings[slot] = begin, params.extra.get("max_initial_timestamp_index", -1)
        return True

    def remove(self, slot: int) -> None:
        del self._settings[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        asked = asked_rows(self._settings, view)
        for row, (begin, max_initial) in asked:
            start, end = int(view.num_prompt_tokens[row]), int(view.num_tokens[row])
            text = view.token_ids[view.slots[row], start:end]
            self._edit(logits[row], text, begin, max_initial)
        require_token(logits, [row for row, _ in asked], view, "timestamp_begin", self.context)
        return logits

    def _edit(self, scores: Tensor, text: np.ndarray, begin: int, max_initial: int) -> None:
        """scores: [vocab_size], in place. text: [n] int32, what was generated."""
        words, times = scores[:begin], scores[begin:]
        words[-1] = -torch.inf  # <|notimestamps|>
        if not len(text):
            words.fill_(-torch.inf)
            if max_initial >= 0:
                times[max_initial + 1 :] = -torch.inf
            return
        has_time = bool(text[-1] >= begin)
        follows_time = len(text) < 2 or bool(text[-2] >= begin)
        if has_time and follows_time:
            times.fill_(-torch.inf)
        elif has_time:
            words[: self._end] = -torch.inf
        found = text[text >= begin]
        if len(found):
            times[: int(found[-1]) - begin + int(not has_time or follows_time)] = -torch.inf
        words.masked_fill_(times.logsumexp(0) > words.max(), -torch.inf)
