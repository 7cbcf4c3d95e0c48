"""SmolLM3: Llama's shape, and layers without positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, RMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, SelfAttention, Stack

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class SmolLM3(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        rotary, bias = RotaryEmbedding(context), bool(raw.get("attention_bias", False))
        every = int(raw.get("no_rope_layer_interval") or 4)
        turns = raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(config.num_layers)]

        def norm(name: str) -> Apply:
            return RMSNorm(context, name, config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            prefix = f"model.layers.{index}"
            attention = SelfAttention(
                context,
                index,
                SplitQKV(context, f"{prefix}.self_attn", bias=bias),
                f"{prefix}.self_attn.o_proj",
                rotary=rotary if turns[index] else None,
                bias=bias,
                sliding_window=config.window_of(index),
            )
            before = (norm(f"{prefix}.input_layernorm"), norm(f"{prefix}.post_attention_layernorm"))
            mlp = GatedMLP(context, f"{prefix}.mlp", bias=bool(raw.get("mlp_bias", False)))
            return Block(context, index, attention, mlp, before=before)

        self.build(
            context,
            embedding=VocabEmbedding(context, "model.embed_tokens"),
            blocks=[block(index) for index in context.layers],
            norm=norm("model.norm"),
            is_tied=bool(raw.get("tie_word_embeddings", True)),
            rotaries=[rotary],
        )
