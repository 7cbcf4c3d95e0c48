"""Drafts what followed the last time the newest token was seen."""

from __future__ import annotations

import numpy as np

from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder


class MineDecoder(SpeculativeDecoder):
    """No state and no model: the sequences are all it looks at."""

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        self.max_drafts = context.options.mine_num_drafts

    def propose(self, view: DraftView) -> Drafts:
        rows = zip(view.slots.tolist(), view.num_tokens.tolist(), view.max_drafts.tolist(), strict=True)
        return Drafts([self._after(view.token_ids[slot, :count], most) for slot, count, most in rows])

    def _after(self, tokens: np.ndarray, most: int) -> list[int]:
        (found,) = np.nonzero(tokens[:-1] == tokens[-1])
        if not len(found):
            return []
        start = int(found[-1]) + 1
        drafts: list[int] = tokens[start : start + min(most, self.max_drafts)].tolist()
        return drafts
