"""Phi-3 and Phi-4: Llama's shape, with Q, K, V in one matrix and gate and up in another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import RMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.qkv import JoinedQKV
from fwk_models._common.stack import Block, JoinedGatedMLP, SelfAttention, Stack

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class Phi3(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        embedding = VocabEmbedding(context, "model.embed_tokens")
        rotary = RotaryEmbedding(context)

        def norm(name: str) -> Apply:
            return RMSNorm(context, name, config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            prefix = f"model.layers.{index}"
            attention = SelfAttention(
                context,
                index,
                JoinedQKV(context, f"{prefix}.self_attn.qkv_proj"),
                f"{prefix}.self_attn.o_proj",
                rotary=rotary,
                sliding_window=config.window_of(index),
            )
            function = str(config.raw.get("hidden_act") or "silu")
            mlp = JoinedGatedMLP(context, f"{prefix}.mlp.gate_up_proj", f"{prefix}.mlp.down_proj", function)
            before = (norm(f"{prefix}.input_layernorm"), norm(f"{prefix}.post_attention_layernorm"))
            return Block(context, index, attention, mlp, before=before)

        blocks = [block(index) for index in context.layers]
        self.build(context, embedding=embedding, blocks=blocks, norm=norm("model.norm"), rotaries=[rotary])
