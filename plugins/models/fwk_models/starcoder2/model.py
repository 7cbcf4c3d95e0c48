"""StarCoder2 (arXiv:2402.19173)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import MLP, Block, SelfAttention, Stack

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class Starcoder2(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        rotary, bias = RotaryEmbedding(context), bool(raw.get("use_bias", True))

        def norm(name: str) -> Apply:
            return LayerNorm(context, name, config.hidden_size, float(raw.get("norm_epsilon") or 1e-5))

        def block(index: int) -> Block:
            prefix = f"model.layers.{index}"
            attention = SelfAttention(
                context,
                index,
                SplitQKV(context, f"{prefix}.self_attn", bias=bias),
                f"{prefix}.self_attn.o_proj",
                rotary=rotary,
                bias=bias,
                sliding_window=config.window_of(index),
            )
            function = str(raw.get("hidden_act") or "gelu_pytorch_tanh")
            mlp = MLP(context, f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj", function, bias=bias)
            before = (norm(f"{prefix}.input_layernorm"), norm(f"{prefix}.post_attention_layernorm"))
            return Block(context, index, attention, mlp, before=before)

        self.build(
            context,
            embedding=VocabEmbedding(context, "model.embed_tokens"),
            blocks=[block(index) for index in context.layers],
            norm=norm("model.norm"),
            is_tied=bool(raw.get("tie_word_embeddings", True)),
            rotaries=[rotary],
        )
