"""Writes the end of the thinking, token by token, where the budget ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows

MAX_LEAD = 4
"""Tokens that may stand before the mark that opens the thinking: line ends, mostly."""


class _Budget:
    """One sequence's. What is forced depends on the tokens alone, so drafts and pre-emption change nothing."""

    def __init__(
        self,
        budget: int,
        opens: Sequence[int],
        closes: Sequence[Sequence[int]],
        end: Sequence[int],
        context: SamplingContext,
    ) -> None:
        self._budget = budget
        self._opens = np.array(opens, np.int32)  # empty: the prompt has opened the thinking
        self._closes = [np.array(close, np.int32) for close in closes]
        self._end = np.array(end, np.int32)
        self._context = context
        self._last: tuple[bytes, bool] = b"", False  # the thinking up to the budget, and whether it closes in there

    def forced(self, text: np.ndarray) -> int | None:
        """The token that has to follow ``text``, the generated tokens [n] int32; None when the model is free."""
        start = self._start(text)
        if start is None or len(text) - start < self._budget:
            return None
        behind = text[start + self._budget :]
        if len(behind) >= len(self._end) or not np.array_equal(behind, self._end[: len(behind)]):
            return None
        return None if self._is_closed(text[start : start + self._budget]) else int(self._end[len(behind)])

    def _start(self, text: np.ndarray) -> int | None:
        """Where the thinking begins."""
        width = len(self._opens)
        for place in range(MAX_LEAD + 1 if width else 1):
            if np.array_equal(text[place : place + width], self._opens):
                return place + width
        return None

    def _is_closed(self, thought: np.ndarray) -> bool:
        key = thought.tobytes()
        if self._last[0] != key:
            self._last = key, any(self._holds(thought, close) for close in self._closes)
        return self._last[1]

    def _holds(self, thought: np.ndarray, close: np.ndarray) -> bool:
        """Whether a closing mark is in there; one of several tokens may have been written with others."""
        if len(close) == 1:
            return bool((thought == close[0]).any())
        texts = self._context.token_bytes()
        return b"".join(texts[i] for i in close.tolist()) in b"".join(texts[i] for i in thought.tolist())


class ThinkingBudget(LogitsProcessor):
    """Allows one token only, from the budget's end until the thinking is closed.

    Reads ``thinking_marks`` alongside its own fields: token ids of the mark that ``opens`` the thinking (none: the
    prompt has opened it), of those that close it (``closes``), and of all that is written at its ``end``.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._budgets: dict[int, _Budget] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        budget, marks = params.extra.get("thinking_token_budget", -1), params.extra.get("thinking_marks")
        if budget < 0:
            return False
        if marks is None:
            raise BlameSequence(
                slot, "thinking_token_budget is for chats: nobody knows what closes the thinking here", is_refusal=True
            )
        self._budgets[slot] = _Budget(budget, marks["opens"], marks["closes"], marks["end"], self.context)
        return True

    def remove(self, slot: int) -> None:
        del self._budgets[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, budget in asked_rows(self._budgets, view):
            begin, end = int(view.num_prompt_tokens[row]), int(view.num_tokens[row])
            token = budget.forced(view.token_ids[view.slots[row], begin:end])
            if token is not None:
                logits[row] = -torch.inf
                logits[row, token] = 0.0
        return logits
