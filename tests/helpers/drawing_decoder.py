"""A speculative decoder that draws its drafts, for tests of what becomes of the distribution."""

from __future__ import annotations

import numpy as np
import torch

from fwk import SpeculativeDecoderSpec, hookimpl
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeDecoder


class DrawingDecoder(SpeculativeDecoder):
    """Draws drafts from distributions of its own, far from the model's."""

    max_drafts = 2
    tokens = (20, 21, 22, 23, 24, 25)
    rng = np.random.default_rng(11)  # continues: drafts drawn once and proposed in every run would not be a sample

    def propose(self, view: DraftView) -> Drafts:
        q = np.zeros(320)
        q[list(self.tokens)] = [0.4, 0.2, 0.15, 0.1, 0.1, 0.05]
        token_ids = [self.rng.choice(320, min(2, most), p=q).tolist() for most in view.max_drafts.tolist()]
        rows = torch.tensor(np.tile(q, (sum(map(len, token_ids)), 1)), dtype=torch.float32)
        return Drafts(token_ids, None, rows)


class DrawingPlugin:
    """Declares it."""

    @hookimpl
    def speculative_decoders(self) -> list[SpeculativeDecoderSpec]:
        return [SpeculativeDecoderSpec(name="drawing", load="tests.helpers.drawing_decoder:DrawingDecoder")]
