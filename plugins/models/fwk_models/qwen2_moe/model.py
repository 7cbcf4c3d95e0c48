"""Qwen2-MoE (arXiv:2407.10671)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk_layers import GatedMLP
from fwk_models._common.experts import ExpertStack, gated_shared_experts, is_sparse
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import SelfAttention

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext
    from fwk_layers import RotaryEmbedding
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
        return gated_shared_experts(context, prefix, normalises=bool(config.raw.get("norm_topk_prob", False)))
