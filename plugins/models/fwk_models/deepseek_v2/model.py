"""DeepSeek-V2 (arXiv:2405.04434) and DeepSeek-V3 (arXiv:2412.19437), which differ in their routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext, TokenPredictor
from fwk_layers import GatedMLP, MoE, RotaryEmbedding, Routing
from fwk_models._common.decoder import Decoder, DecoderLayer
from fwk_models._common.experts import SharedExperts, corrected_experts, skip_predictors
from fwk_models._common.predictor import Layer, make_predictors
from fwk_models.deepseek_v2.attention import LatentAttention

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch
    from fwk_models._common.stack import Apply


class DeepseekV2(Decoder):
    """The decoder with latent attention, and experts behind the first dense layers."""

    def make_rotary(self, context: ModelContext) -> RotaryEmbedding:
        is_interleaved = bool(context.config.raw.get("rope_interleave", True))
        return RotaryEmbedding(context, context.config.integer("qk_rope_head_dim"), is_interleaved=is_interleaved)

    def make_layer(self, context: ModelContext, index: int) -> DecoderLayer:
        config = context.config
        is_dense = index < config.integer("first_k_dense_replace", 0, low=0)
        bias = bool(config.raw.get("mlp_bias", False))
        return DecoderLayer(
            context,
            index,
            lambda prefix: LatentAttention(context, self.rotary, prefix, index),
            lambda prefix: GatedMLP(context, prefix, bias=bias) if is_dense else self.experts(context, prefix),
        )

    def experts(self, context: ModelContext, prefix: str) -> Apply:
        """Routed and shared experts of a layer."""
        return greedy_experts(context, prefix)


class DeepseekV3(DeepseekV2):
    """DeepSeek-V3, R1 and models of their shape."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        skip_predictors(context)

    def experts(self, context: ModelContext, prefix: str) -> Apply:
        return corrected_experts(context, prefix)

    def make_predictors(self, context: ModelContext) -> Sequence[TokenPredictor]:
        def layer(context: ModelContext, index: int) -> Layer:
            layer = self.make_layer(context, index)

            def apply(x: Tensor, batch: ForwardBatch) -> Tensor:
                x, residual = layer(x, None, self.rotary.rows(batch.positions), batch)
                return x + residual

            return apply

        return make_predictors(context, self.head, layer)


def greedy_experts(context: ModelContext, prefix: str) -> SharedExperts:
    """DeepSeek-V2's: routed by softmax, and shared ones that every token passes through."""
    config, raw = context.config, context.config.raw
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy") or raw.get("scoring_func", "softmax") != "softmax":
        raise ModelLoadError(
            f"{prefix}: routing by {method!r} and {raw.get('scoring_func', 'softmax')!r} is not known; "
            "DeepSeek-V2 routes greedily by softmax"
        )
    if raw.get("norm_topk_prob") or raw.get("moe_layer_freq", 1) != 1:
        raise ModelLoadError(f"{prefix}: 'norm_topk_prob' and 'moe_layer_freq' are not known for DeepSeek-V2")
    inner = config.integer("moe_intermediate_size")
    is_grouped = method == "group_limited_greedy"
    routing = Routing(
        config.integer("n_routed_experts"),
        config.integer("num_experts_per_tok"),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        num_groups=config.integer("n_group") if is_grouped else 1,
        top_groups=config.integer("topk_group") if is_grouped else 1,
        in_float32=True,
    )
    routed = MoE(context, prefix, routing, intermediate_size=inner)
    shared = GatedMLP(
        context,
        f"{prefix}.shared_experts",
        intermediate_size=inner * config.integer("n_shared_experts"),
        bias=bool(raw.get("mlp_bias", False)),
    )
    return SharedExperts(routed, shared)
