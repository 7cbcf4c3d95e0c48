"""DeepSeek-V2 (arXiv:2405.04434)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk.layers import GatedMLP, MoE, RotaryEmbedding, Routing
from fwk_models._common.decoder import Decoder, DecoderLayer
from fwk_models.deepseek_v2.attention import LatentAttention

if TYPE_CHECKING:
    from torch import Tensor


class DeepseekV2(Decoder):
    """The decoder with latent attention, and experts behind the first dense layers."""

    def make_rotary(self, context: ModelContext) -> RotaryEmbedding:
        return RotaryEmbedding(context, context.config.integer("qk_rope_head_dim"), is_interleaved=True)

    def make_layer(self, context: ModelContext, index: int) -> DecoderLayer:
        config = context.config
        is_dense = index < config.integer("first_k_dense_replace", 0, low=0)
        bias = bool(config.raw.get("mlp_bias", False))
        return DecoderLayer(
            context,
            index,
            lambda prefix: LatentAttention(context, self.rotary, prefix, index),
            lambda prefix: GatedMLP(context, prefix, bias=bias) if is_dense else Experts(context, prefix),
        )


class Experts:
    """Routed experts, and shared ones that every token passes through."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
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
        self.routed = MoE(context, prefix, routing, intermediate_size=inner)
        self.shared = GatedMLP(
            context,
            f"{prefix}.shared_experts",
            intermediate_size=inner * config.integer("n_shared_experts"),
            bias=bool(raw.get("mlp_bias", False)),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        return self.routed(x).add_(self.shared(x))
