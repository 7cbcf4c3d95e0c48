"""Qwen2-MoE (arXiv:2407.10671)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.layers import GatedMLP, MoE, Routing
from fwk_models._common.experts import ExpertStack, SharedExperts, is_sparse, num_experts
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import SelfAttention

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext
    from fwk.layers import RotaryEmbedding
    from fwk_models._common.stack import Apply


class Qwen2Moe(ExpertStack):
    """Token ids to hidden states to logits."""

    def attention(self, context: ModelContext, index: int, prefix: str, rotary: RotaryEmbedding) -> SelfAttention:
        qkv = SplitQKV(context, prefix, bias=bool(context.config.raw.get("qkv_bias", True)))
        window = context.config.window_of(index)
        return SelfAttention(context, index, qkv, f"{prefix}.o_proj", rotary=rotary, sliding_window=window)

    def mlp(self, context: ModelContext, index: int, prefix: str) -> Apply:
        config, prefix = context.config, f"{prefix}.mlp"
        if not is_sparse(config, index):
            return GatedMLP(context, prefix)
        normalises = bool(config.raw.get("norm_topk_prob", False))
        routing = Routing(num_experts(config), config.integer("num_experts_per_tok"), normalises=normalises)
        routed = MoE(context, prefix, routing, intermediate_size=config.integer("moe_intermediate_size"))
        inner = config.integer("shared_expert_intermediate_size")
        shared = GatedMLP(context, f"{prefix}.shared_expert", intermediate_size=inner)
        gate = context.weights.tensor(f"{prefix}.shared_expert_gate.weight", (1, config.hidden_size))
        return SharedExperts(routed, shared, gate.to(context.device, context.dtype))
