"""GPT-NeoX (arXiv:2204.06745): attention and MLP both read the stream, and are added to it together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.qkv import GroupedQKV
from fwk_models._common.stack import MLP, Block, SelfAttention, Stack

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class GPTNeoX(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        rotary = RotaryEmbedding(context)
        bias = bool(raw.get("attention_bias", True))

        def norm(name: str) -> Apply:
            return LayerNorm(context, name, config.hidden_size, float(raw.get("layer_norm_eps") or 1e-5))

        def block(index: int) -> Block:
            prefix = f"gpt_neox.layers.{index}"
            for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq"):
                context.weights.skip(f"{prefix}.attention.{buffer}")
            qkv = GroupedQKV(context, f"{prefix}.attention.query_key_value", bias=bias)
            attention = SelfAttention(context, index, qkv, f"{prefix}.attention.dense", rotary=rotary, bias=bias)
            mlp = MLP(
                context,
                f"{prefix}.mlp.dense_h_to_4h",
                f"{prefix}.mlp.dense_4h_to_h",
                str(raw.get("hidden_act") or "gelu"),
                bias=True,
            )
            before = (norm(f"{prefix}.input_layernorm"), norm(f"{prefix}.post_attention_layernorm"))
            parallel = bool(raw.get("use_parallel_residual", True))
            return Block(context, index, attention, mlp, before=before, is_parallel=parallel)

        self.build(
            context,
            embedding=VocabEmbedding(context, "gpt_neox.embed_in"),
            blocks=[block(index) for index in context.layers],
            norm=norm("gpt_neox.final_layer_norm"),
            head="embed_out",
            rotaries=[rotary],
        )
