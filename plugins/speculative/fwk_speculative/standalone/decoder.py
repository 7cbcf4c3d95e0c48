"""Speculative decoding with a draft model (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fwk.errors import ConfigError
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder, Verified
from fwk.types import ForwardBatch
from fwk_speculative._common import DraftDepth
from fwk_speculative._common.chains import Chains
from fwk_speculative.standalone import StandaloneOptions

if TYPE_CHECKING:
    from torch import Tensor


class StandaloneDecoder(SpeculativeDecoder):
    """Runs the draft model over everything the target computes, then a few tokens on.

    Its layers live in the target's KV cache, so a prefix found there is one for the draft model too. Drafts are
    picked with the target's own sampling settings and seeds (see ``DraftSteps.pick``): they are what the target
    picks wherever the models agree, and a sampled output is token for token the one without speculation.
    """

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        options = context.options or StandaloneOptions()
        name = options.draft_model()
        if not name:
            raise ConfigError("--speculative-algorithm standalone needs a model: give --speculative-draft-model-path")
        self.max_drafts = options.chain_length()
        self.acceptance = options.acceptance()
        self._depth = DraftDepth(context.num_slots, self.max_drafts, options.speculative_adaptive)
        self.drafts_late = True
        self._model = context.load_model(name)

    def follow(self, batch: ForwardBatch) -> None:
        self._model.forward(batch)

    def observe(self, verified: Verified) -> None:
        self._depth.observe(verified)

    def forget(self, slots: Sequence[int]) -> None:
        self._depth.reset(list(slots))

    def propose(self, view: DraftView) -> Drafts:
        chains = Chains(np.minimum(view.max_drafts, self._depth.of(view.slots)), self.context.send)
        tokens: Sequence[int] | Tensor
        if view.newest is None:
            tokens = view.token_ids[view.slots, view.num_tokens - 1][chains.rows].tolist()
        else:
            tokens = view.newest.index_select(0, self.context.send(chains.rows))
        ahead = 0
        while len(chains.rows):
            rows = chains.rows
            hidden = self._model.forward(view.steps.batch(rows, tokens, ahead))
            tokens = view.steps.choose(self._model.logits(hidden), rows, ahead)
            left = chains.add(tokens)
            tokens = tokens if left is None else tokens.index_select(0, left)
            ahead += 1
        return chains.drafts()
