"""Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, MoE, Routing
from fwk_models._common.attention import NormedAttention
from fwk_models._common.decoder import Decoder, DecoderLayer
from fwk_models._common.experts import is_sparse, num_experts

if TYPE_CHECKING:
    from fwk.types import ModelConfig


class Qwen3(Decoder):
    """The decoder with normalised queries and keys, and experts in the layers that have them."""

    def make_layer(self, context: ModelContext, index: int) -> DecoderLayer:
        config = context.config
        bias = bool(config.raw.get("attention_bias", False))
        make_mlp = experts if has_experts(config, index) else GatedMLP
        return DecoderLayer(
            context,
            index,
            lambda prefix: NormedAttention(context, self.rotary, prefix, index, bias=bias),
            lambda prefix: make_mlp(context, prefix),
        )


def has_experts(config: ModelConfig, index: int) -> bool:
    """Whether the layer is a mixture of experts."""
    if config.architecture == "Qwen3ForCausalLM":
        return False
    return is_sparse(config, index)


def experts(context: ModelContext, prefix: str) -> MoE:
    """A layer's experts."""
    config = context.config
    normalises = bool(config.raw.get("norm_topk_prob", False))
    routing = Routing(num_experts(config), config.integer("num_experts_per_tok"), normalises=normalises)
    return MoE(context, prefix, routing, intermediate_size=config.integer("moe_intermediate_size"))
