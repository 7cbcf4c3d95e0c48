"""gpt-oss (arXiv:2508.10925)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk_layers import MoE, Part, Routing
from fwk_layers.activation import CLAMPED_SWIGLU
from fwk_layers.sharding import output_shard
from fwk_models._common.experts import ExpertStack, num_experts
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import SelfAttention
from fwk_models.gpt_oss.experts import BLOCK, GptOssExperts, StackedQuantization

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk_layers import RotaryEmbedding
    from fwk_models._common.stack import Apply

CONSTANTS = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "hidden_act": "silu"}


class GptOss(ExpertStack):
    """Token ids to hidden states to logits; the weights of a token's experts are a softmax over their scores alone."""

    def attention(self, context: ModelContext, index: int, prefix: str, rotary: RotaryEmbedding) -> SelfAttention:
        config = context.config
        bias = bool(config.raw.get("attention_bias", True))
        return SelfAttention(
            context,
            index,
            SplitQKV(context, prefix, bias=bias),
            f"{prefix}.o_proj",
            rotary=rotary,
            bias=bias,
            sliding_window=config.window_of(index),
            extras={"sinks": _sinks(context, f"{prefix}.sinks")},
        )

    def mlp(self, context: ModelContext, index: int, prefix: str) -> Apply:
        config, prefix = context.config, f"{prefix}.mlp"
        for name, value in CONSTANTS.items():
            if config.raw.get(name, value) != value:
                raise ModelLoadError(f"'{name}' is {config.raw[name]}: gpt-oss is served with {value}")
        count = num_experts(config)
        routing = Routing(count, config.integer("num_experts_per_tok"), normalises=True)
        if not context.weights.has(f"{prefix}.experts.0.gate_proj.weight"):  # as published; GGUF has them apart
            context = _stacked(context, prefix, count)
        return MoE(
            context,
            prefix,
            routing,
            intermediate_size=config.intermediate_size,
            activation=CLAMPED_SWIGLU,
            router=f"{prefix}.router",
            has_bias=True,
        )


def _stacked(context: ModelContext, prefix: str, num_experts: int) -> ModelContext:
    """Experts in one tensor: blocks stay as they are where ranks that share an expert each get whole ones."""
    config = context.config
    inner, sharers = config.intermediate_size, context.tp.size // context.ep_size
    weights = GptOssExperts(context.weights, prefix, num_experts, config.hidden_size, inner)
    if inner % (BLOCK * sharers):
        return replace(context, weights=weights)
    return replace(context, weights=weights, quant=StackedQuantization(context.quant, prefix))


def _sinks(context: ModelContext, name: str) -> Tensor:
    """This rank's heads' sinks, in float32."""
    heads = context.config.num_heads
    whole = context.weights.tensor(name, (heads,))
    return output_shard(Part(name, heads, heads), context.tp).cut(whole, 0, 1, name).to(context.device, torch.float32)
