"""Medusa (arXiv:2401.10774): heads on the target's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from fwk.errors import ConfigError
from fwk.interfaces.speculative import (
    Drafts,
    DraftView,
    SpeculativeContext,
    SpeculativeDecoder,
    TargetStep,
    Verified,
)
from fwk_layers import LMHead, ReplicatedLinear
from fwk_speculative._common import DraftDepth
from fwk_speculative._common.chains import Chains
from fwk_speculative._common.trees import DraftTrees
from fwk_speculative.medusa import MedusaOptions

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class MedusaHead:
    """Residual blocks x + silu(linear(x)), and a projection onto the vocabulary."""

    def __init__(self, context: ModelContext, blocks: Sequence[str], projection: str) -> None:
        size, has = context.config.hidden_size, context.weights.has
        self.blocks = [ReplicatedLinear(context, name, size, size, bias=has(f"{name}.bias")) for name in blocks]
        self.projection = LMHead(context, projection)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size]."""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return self.projection(hidden)


def make_heads(context: ModelContext) -> list[MedusaHead]:
    """The heads of a checkpoint, named as by Medusa's authors or as converted for vLLM."""
    count, depth = (context.config.integer(f"medusa_num_{what}", 1) for what in ("heads", "layers"))
    if not context.config.raw.get("medusa_num_heads"):
        count = context.config.integer("num_heads")
        depth = context.config.integer("num_hidden_layers", 1)
    if context.weights.has("blocks.0.layers.0.weight"):
        names = [([f"blocks.{i}.layers.{j}" for j in range(depth)], f"lm_heads.{i}") for i in range(count)]
    else:
        names = [([f"{i}.{j}.linear" for j in range(depth)], f"{i}.{depth}") for i in range(count)]
    return [MedusaHead(context, blocks, projection) for blocks, projection in names]


class MedusaDecoder(SpeculativeDecoder):
    """All drafts come from the hidden state that the newest token was chosen by; there is nothing to remember."""

    reads_hidden = True

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        options = context.options or MedusaOptions()
        name = options.draft_model()
        if not name:
            raise ConfigError("--speculative-algorithm medusa needs heads: give --speculative-draft-model-path")
        assert context.build is not None
        self._heads = context.build(make_heads, name)
        self._width, levels, self.max_drafts = options.tree_shape()
        self.acceptance = options.acceptance()
        self._heads = self._heads[:levels]
        self.max_drafts = min(self.max_drafts, len(self._heads)) if self._width == 1 else self.max_drafts
        self._depth = DraftDepth(context.num_slots, len(self._heads), options.speculative_adaptive)
        self.drafts_late, self.drafts_trees = True, self._width > 1
        self._levels = np.zeros(context.num_slots, np.int64)
        self._hidden: Tensor | None = None  # [num_slots, hidden_size]: each slot's newest

    @property
    def max_passes(self) -> int:
        return 0

    @property
    def max_levels(self) -> int:
        return len(self._heads)

    def learn(self, step: TargetStep) -> None:
        last = step.hidden.index_select(0, step.last)
        if self._hidden is None:
            self._hidden = last.new_zeros((self.context.num_slots, last.shape[1]))
        self._hidden.index_copy_(0, self.context.send(step.slots), last)

    def observe(self, verified: Verified) -> None:
        levels = verified.num_drafts
        if self._width > 1:
            levels = np.minimum(levels, self._levels[verified.slots])
        self._depth.observe(Verified(verified.slots, levels, verified.num_accepted))

    def forget(self, slots: Sequence[int]) -> None:
        self._depth.reset(list(slots))

    def propose(self, view: DraftView) -> Drafts:
        depth = np.minimum(view.max_drafts, self._depth.of(view.slots))
        chains = Chains(depth, self.context.send)
        rows = chains.rows
        self._levels[view.slots[rows]] = depth[rows]  # others may have drafts that are being verified
        if not len(rows):
            return chains.drafts()
        assert self._hidden is not None, "the target computed no step yet"
        hidden = self._hidden.index_select(0, self.context.send(view.slots[rows]))
        if self._width > 1:
            return self._trees(view, rows, hidden, int(depth.max()))
        for ahead, head in enumerate(self._heads):
            left = chains.add(view.steps.choose(head(hidden), chains.rows, ahead))
            if not len(chains.rows):
                break
            hidden = hidden if left is None else hidden.index_select(0, left)
        return chains.drafts()

    def _trees(self, view: DraftView, rows: np.ndarray, hidden: Tensor, levels: int) -> Drafts:
        """The likeliest paths, as if the heads' choices did not depend on each other."""
        logprobs = [torch.log_softmax(head(hidden).float(), -1) for head in self._heads[:levels]]
        trees = DraftTrees(self._width, logprobs[0])
        for each in logprobs[1:]:
            trees.grow(each.unsqueeze(1).expand(-1, self._width, -1))
        return trees.drafts(rows, np.minimum(view.max_drafts, self.max_drafts), self.context.send)
