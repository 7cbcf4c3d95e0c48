"""Gemma and Gemma 2: scaled embeddings, norms that add one to their weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, OffsetRMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, SelfAttention, Stack

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class Gemma(Stack):
    """Norms before attention and MLP."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        embedding = VocabEmbedding(context, "model.embed_tokens", scale=config.hidden_size**0.5)
        self.rotary = RotaryEmbedding(context)
        blocks = [self.block(context, index) for index in context.layers]
        self.build(
            context,
            embedding=embedding,
            blocks=blocks,
            norm=norm(context, "model.norm"),
            is_tied=bool(config.raw.get("tie_word_embeddings", True)),
            rotaries=[self.rotary],
            soft_cap=config.raw.get("final_logit_softcapping"),
        )

    def block(self, context: ModelContext, index: int) -> Block:
        """Layer ``index``."""
        prefix = f"model.layers.{index}"
        before = (norm(context, f"{prefix}.input_layernorm"), norm(context, f"{prefix}.post_attention_layernorm"))
        return Block(context, index, self.attention(context, index), self.mlp(context, index), before=before)

    def attention(self, context: ModelContext, index: int) -> SelfAttention:
        """With the scale and the cap that the config names."""
        config, raw, prefix = context.config, context.config.raw, f"model.layers.{index}.self_attn"
        bias, scalar = bool(raw.get("attention_bias", False)), raw.get("query_pre_attn_scalar")
        return SelfAttention(
            context,
            index,
            SplitQKV(context, prefix, bias=bias),
            f"{prefix}.o_proj",
            rotary=self.rotary,
            bias=bias,
            scale=float(scalar) ** -0.5 if scalar else None,
            sliding_window=config.window_of(index),
            soft_cap=raw.get("attn_logit_softcapping"),
        )

    def mlp(self, context: ModelContext, index: int) -> GatedMLP:
        """Older configs call the function "gelu" and mean its approximation."""
        function = context.config.raw.get("hidden_activation") or "gelu_pytorch_tanh"
        return GatedMLP(context, f"model.layers.{index}.mlp", activation=function)


class Gemma2(Gemma):
    """Norms before and behind attention and MLP."""

    def block(self, context: ModelContext, index: int) -> Block:
        prefix = f"model.layers.{index}"
        before = (norm(context, f"{prefix}.input_layernorm"), norm(context, f"{prefix}.pre_feedforward_layernorm"))
        after = (
            norm(context, f"{prefix}.post_attention_layernorm"),
            norm(context, f"{prefix}.post_feedforward_layernorm"),
        )
        attention, mlp = self.attention(context, index), self.mlp(context, index)
        return Block(context, index, attention, mlp, before=before, after=after)


def norm(context: ModelContext, name: str) -> Apply:
    """A norm of the stream."""
    return OffsetRMSNorm(context, name, context.config.hidden_size, context.config.rms_norm_eps)
