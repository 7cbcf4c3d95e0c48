"""Makes tokens that the text has already more, or less, likely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import SamplingParams


class MineProcessor(LogitsProcessor):
    """Holds one number for each slot that asked."""

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._echo: dict[int, float] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        extra: Mapping[str, float] = params.extra
        self._echo.pop(slot, None)
        if extra.get("mine_echo"):
            self._echo[slot] = extra["mine_echo"]
        return slot in self._echo

    def remove(self, slot: int) -> None:
        del self._echo[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        for row, (slot, count) in enumerate(zip(view.slots.tolist(), view.num_tokens.tolist(), strict=True)):
            if slot in self._echo:
                said = torch.from_numpy(np.unique(view.token_ids[slot, :count])).long()
                logits[row, said] += self._echo[slot]
        return logits
