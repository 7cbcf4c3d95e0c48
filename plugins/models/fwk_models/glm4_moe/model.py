"""GLM-4.5 (arXiv:2508.06471): experts routed as in DeepSeek-V3, under ordinary attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fwk_layers import GatedMLP
from fwk_models._common.experts import ExpertStack, corrected_experts, skip_predictors
from fwk_models._common.norms import HeadNorm
from fwk_models._common.predictor import Layer, make_predictors
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import SelfAttention

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext, TokenPredictor
    from fwk_layers import RotaryEmbedding
    from fwk_models._common.stack import Apply


class Glm4Moe(ExpertStack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        skip_predictors(context)

    def attention(self, context: ModelContext, index: int, prefix: str, rotary: RotaryEmbedding) -> SelfAttention:
        raw = context.config.raw
        qkv = SplitQKV(context, prefix, bias=bool(raw.get("attention_bias", False)))
        norm = HeadNorm(context, prefix) if raw.get("use_qk_norm") else None
        return SelfAttention(context, index, qkv, f"{prefix}.o_proj", rotary=rotary, norm=norm)

    def mlp(self, context: ModelContext, index: int, prefix: str) -> Apply:
        if index < context.config.integer("first_k_dense_replace", 0, low=0):
            return GatedMLP(context, f"{prefix}.mlp")
        return corrected_experts(context, f"{prefix}.mlp")

    def make_predictors(self, context: ModelContext) -> Sequence[TokenPredictor]:
        [rotary] = self.rotaries

        def layer(context: ModelContext, index: int) -> Layer:
            block = self.block(context, index, rotary)
            return lambda x, batch: block(x, {rotary: rotary.rows(batch.positions)}, batch)

        return make_predictors(context, self.head, layer)
