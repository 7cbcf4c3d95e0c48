"""Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk_layers import MoE, Routing
from fwk_models._common.experts import ExpertStack, num_experts

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext
    from fwk_models._common.stack import Apply


class Mixtral(ExpertStack):
    """Token ids to hidden states to logits; the weights of a token's experts sum to one."""

    def mlp(self, context: ModelContext, index: int, prefix: str) -> Apply:
        config = context.config
        routing = Routing(num_experts(config), config.integer("num_experts_per_tok"), normalises=True)
        return MoE(
            context,
            f"{prefix}.block_sparse_moe",
            routing,
            intermediate_size=config.intermediate_size,
            names=("w1", "w3", "w2"),
        )
