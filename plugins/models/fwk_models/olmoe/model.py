"""OLMoE (arXiv:2409.02060)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk_layers import MoE, Routing
from fwk_models._common.experts import ExpertStack, num_experts
from fwk_models._common.norms import WholeNorm
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import SelfAttention

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext
    from fwk_layers import RotaryEmbedding
    from fwk_models._common.stack import Apply


class Olmoe(ExpertStack):
    """Token ids to hidden states to logits."""

    def attention(self, context: ModelContext, index: int, prefix: str, rotary: RotaryEmbedding) -> SelfAttention:
        raw = context.config.raw
        if raw.get("clip_qkv") is not None:
            raise ModelLoadError(f"'clip_qkv' is {raw['clip_qkv']}: OLMoE is served without clipped queries and keys")
        bias, norm = bool(raw.get("attention_bias", False)), WholeNorm(context, prefix)
        qkv = SplitQKV(context, prefix, bias=bias)
        return SelfAttention(context, index, qkv, f"{prefix}.o_proj", rotary=rotary, norm=norm, bias=bias)

    def mlp(self, context: ModelContext, index: int, prefix: str) -> Apply:
        config = context.config
        normalises = bool(config.raw.get("norm_topk_prob", False))
        routing = Routing(num_experts(config), config.integer("num_experts_per_tok"), normalises=normalises)
        return MoE(context, f"{prefix}.mlp", routing, intermediate_size=config.intermediate_size)
