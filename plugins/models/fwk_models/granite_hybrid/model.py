"""Granite 4 (IBM 2025): Mamba-2 and attention with Granite's factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk_layers import RMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.experts import granite_experts
from fwk_models._common.hybrid_stack import HybridStack
from fwk_models._common.mamba2 import Mamba2Mixer, MixerSizes, step_limits
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, JoinedGatedMLP, SelfAttention

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext
    from fwk_models._common.stack import Apply


class GraniteHybrid(HybridStack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        kind = raw.get("position_embedding_type") or "nope"
        if kind not in ("nope", "rope"):
            raise ModelLoadError(f"config.json: position_embedding_type {kind!r} is not known; nope and rope are")
        self.rotary = RotaryEmbedding(context) if kind == "rope" else None
        self.sizes = MixerSizes(
            config.integer("mamba_n_heads", 128),
            config.integer("mamba_expand", 2) * config.hidden_size // config.integer("mamba_n_heads", 128),
            config.integer("mamba_n_groups", 1),
            config.integer("mamba_d_state", 256),
            config.integer("mamba_d_conv", 4, low=2),
            config.rms_norm_eps,
            step_limits(raw.get("time_step_limit")),
            bias=bool(raw.get("mamba_proj_bias", False)),
            conv_bias=bool(raw.get("mamba_conv_bias", True)),
        )
        self.width = self.sizes.width
        self.build(
            context,
            embedding=VocabEmbedding(
                context, "model.embed_tokens", scale=float(raw.get("embedding_multiplier") or 1.0)
            ),
            blocks=[self._block(context, index) for index in range(config.num_layers)],
            norm=RMSNorm(context, "model.norm", config.hidden_size, config.rms_norm_eps),
            rotaries=[] if self.rotary is None else [self.rotary],
            logit_scale=1.0 / float(raw.get("logits_scaling") or 1.0),
        )

    def _block(self, context: ModelContext, index: int) -> Block:
        config, raw, prefix = context.config, context.config.raw, f"model.layers.{index}"
        names = ("input_layernorm", "post_attention_layernorm")
        first, second = (RMSNorm(context, f"{prefix}.{n}", config.hidden_size, config.rms_norm_eps) for n in names)
        if config.layer_type(index) == "linear_attention":
            mixer = self.recurrent(Mamba2Mixer(context, f"{prefix}.mamba", self.sizes))
        else:
            name, bias = f"{prefix}.self_attn", bool(raw.get("attention_bias", False))
            scale, qkv = float(raw.get("attention_multiplier") or 1.0), SplitQKV(context, name, bias=bias)
            mixer = SelfAttention(context, index, qkv, f"{name}.o_proj", rotary=self.rotary, bias=bias, scale=scale)
        factor = float(raw.get("residual_multiplier") or 1.0)
        return Block(context, index, mixer, self._mlp(context, prefix), before=(first, second), factor=factor)

    def _mlp(self, context: ModelContext, prefix: str) -> Apply:
        names, inner = f"{prefix}.shared_mlp", context.config.integer("shared_intermediate_size", 1024)
        function = str(context.config.raw.get("hidden_act", "silu"))
        shared = JoinedGatedMLP(context, f"{names}.input_linear", f"{names}.output_linear", function, inner)
        if not context.config.raw.get("num_local_experts"):
            return shared
        routed = granite_experts(context, f"{prefix}.block_sparse_moe")
        return lambda x: routed(x).add_(shared(x))
