"""Jamba (Lieber et al. 2024, arXiv:2403.19887)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk_layers import GatedMLP, MoE, RMSNorm, Routing, VocabEmbedding
from fwk_models._common.hybrid_stack import HybridStack
from fwk_models._common.mamba import MambaMixer, MambaSizes, step_rank
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, SelfAttention

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext
    from fwk_models._common.stack import Apply, Mixer


class Jamba(HybridStack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        self.width = config.integer("mamba_d_conv", 4, low=2)
        self.sizes = MambaSizes(
            config.integer("mamba_expand", 2) * config.hidden_size,
            config.integer("mamba_d_state", 16),
            step_rank(config, "mamba_dt_rank"),
            self.width,
            bias=bool(raw.get("mamba_proj_bias", False)),
            conv_bias=bool(raw.get("mamba_conv_bias", True)),
        )
        self.build(
            context,
            embedding=VocabEmbedding(context, "model.embed_tokens"),
            blocks=[self._block(context, index) for index in range(config.num_layers)],
            norm=RMSNorm(context, "model.final_layernorm", config.hidden_size, config.rms_norm_eps),
        )

    def _block(self, context: ModelContext, index: int) -> Block:
        config, prefix = context.config, f"model.layers.{index}"
        names = ("input_layernorm", "pre_ff_layernorm")
        first, second = (RMSNorm(context, f"{prefix}.{n}", config.hidden_size, config.rms_norm_eps) for n in names)
        mlp = self._mlp(context, index, f"{prefix}.feed_forward")
        return Block(context, index, self._mixer(context, index, prefix), mlp, before=(first, second))

    def _mixer(self, context: ModelContext, index: int, prefix: str) -> Mixer:
        if context.config.layer_type(index) == "full_attention":
            name = f"{prefix}.self_attn"
            return SelfAttention(context, index, SplitQKV(context, name), f"{name}.o_proj")
        prefix, sizes, eps = f"{prefix}.mamba", self.sizes, context.config.rms_norm_eps
        step, b, c = (
            RMSNorm(context, f"{prefix}.{name}_layernorm", size, eps)
            for name, size in (("dt", sizes.rank), ("b", sizes.state_size), ("c", sizes.state_size))
        )
        return self.recurrent(MambaMixer(context, prefix, sizes, (step, b, c)))

    def _mlp(self, context: ModelContext, index: int, prefix: str) -> Apply:
        config = context.config
        count = config.integer("num_experts", 16)
        period, offset = config.integer("expert_layer_period", 2), config.integer("expert_layer_offset", 1, low=0)
        if offset >= period:
            raise ModelLoadError(
                f"config.json: expert_layer_offset {offset} must be less than expert_layer_period {period}"
            )
        if count == 1 or index % period != offset:
            return GatedMLP(context, prefix)
        routing = Routing(count, config.integer("num_experts_per_tok", 2), normalises=False)
        inner = config.intermediate_size
        return MoE(context, prefix, routing, intermediate_size=inner, router=f"{prefix}.router")
