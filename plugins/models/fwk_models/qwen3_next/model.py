"""Qwen3-Next (Qwen team 2025): gated delta rules and gated attention over sparse experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk_layers import GatedMLP
from fwk_models._common.experts import gated_shared_experts, is_sparse
from fwk_models._common.gated_hybrid import GatedHybrid

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext
    from fwk_models._common.stack import Apply


class Qwen3Next(GatedHybrid):
    """Token ids to hidden states to logits."""

    def mlp(self, context: ModelContext, prefix: str, index: int) -> Apply:
        has_experts = context.config.num_experts and is_sparse(context.config, index)
        if not has_experts:
            return GatedMLP(context, prefix)
        return gated_shared_experts(context, prefix, normalises=bool(context.config.raw["norm_topk_prob"]))
