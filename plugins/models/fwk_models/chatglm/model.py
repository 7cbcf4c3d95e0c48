"""ChatGLM 2 and 3 (arXiv:2406.12793)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import RMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.qkv import JoinedQKV
from fwk_models._common.stack import Block, JoinedGatedMLP, SelfAttention, Stack

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class ChatGLM(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        rotary, bias = RotaryEmbedding(context, is_interleaved=True), bool(raw.get("add_bias_linear", False))

        def norm(name: str) -> Apply:
            return RMSNorm(context, f"transformer.encoder.{name}", config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            name = f"transformer.encoder.layers.{index}"
            names = f"{name}.self_attention.query_key_value", f"{name}.self_attention.dense"
            qkv = JoinedQKV(context, names[0], bias=bias or bool(raw.get("add_qkv_bias", False)))
            attention = SelfAttention(context, index, qkv, names[1], rotary=rotary, bias=bias)
            mlp = JoinedGatedMLP(context, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h", "silu")
            before = (norm(f"layers.{index}.input_layernorm"), norm(f"layers.{index}.post_attention_layernorm"))
            return Block(context, index, attention, mlp, before=before)

        self.build(
            context,
            embedding=VocabEmbedding(context, "transformer.embedding.word_embeddings"),
            blocks=[block(index) for index in context.layers],
            norm=norm("final_layernorm"),
            rotaries=[rotary],
            head="transformer.output_layer",
        )
        context.weights.skip("transformer.rotary_pos_emb.inv_freq")
