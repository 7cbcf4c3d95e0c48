"""Granite and MiniCPM (arXiv:2404.06395): Llama's shape, its parts scaled so that settings carry over between sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, RMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.experts import granite_experts
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, SelfAttention, Stack

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


@dataclass(frozen=True, slots=True)
class Factors:
    """What parts are multiplied with; scores: None for the usual scale."""

    embedding: float
    stream: float
    logits: float
    scores: float | None = None


class Scaled(Stack):
    """Llama's shape with factors."""

    def put_together(self, context: ModelContext, factors: Factors) -> None:
        """Build all layers."""
        config = context.config
        rotary, bias = RotaryEmbedding(context), bool(config.raw.get("attention_bias", False))

        def norm(name: str) -> Apply:
            return RMSNorm(context, name, config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            prefix = f"model.layers.{index}"
            attention = SelfAttention(
                context,
                index,
                SplitQKV(context, f"{prefix}.self_attn", bias=bias),
                f"{prefix}.self_attn.o_proj",
                rotary=rotary,
                bias=bias,
                scale=factors.scores,
            )
            before = (norm(f"{prefix}.input_layernorm"), norm(f"{prefix}.post_attention_layernorm"))
            return Block(context, index, attention, self.mlp(context, prefix), before=before, factor=factors.stream)

        self.build(
            context,
            embedding=VocabEmbedding(context, "model.embed_tokens", scale=factors.embedding),
            blocks=[block(index) for index in context.layers],
            norm=norm("model.norm"),
            rotaries=[rotary],
            logit_scale=factors.logits,
        )

    def mlp(self, context: ModelContext, prefix: str) -> Apply:
        """The feed-forward network of the layer at ``prefix``."""
        return GatedMLP(context, f"{prefix}.mlp", bias=bool(context.config.raw.get("mlp_bias", False)))


class Granite(Scaled):
    """IBM's Granite 3, dense and with experts."""

    def __init__(self, context: ModelContext) -> None:
        raw = context.config.raw
        factors = Factors(
            embedding=float(raw.get("embedding_multiplier", 1.0)),
            stream=float(raw.get("residual_multiplier", 1.0)),
            logits=1.0 / float(raw.get("logits_scaling", 1.0)),
            scores=float(raw["attention_multiplier"]) if "attention_multiplier" in raw else 1.0,
        )
        self.put_together(context, factors)

    def mlp(self, context: ModelContext, prefix: str) -> Apply:
        if context.config.architecture == "GraniteForCausalLM":
            return super().mlp(context, prefix)
        return granite_experts(context, f"{prefix}.block_sparse_moe")


class MiniCPM(Scaled):
    """MiniCPM 1 and 2."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        depth = float(raw.get("scale_depth", 1.0))
        factors = Factors(
            embedding=float(raw.get("scale_emb", 1.0)),
            stream=depth / config.num_layers**0.5,
            logits=float(raw.get("dim_model_base", config.hidden_size)) / config.hidden_size,
        )
        self.put_together(context, factors)
