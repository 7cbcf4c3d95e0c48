"""Falcon (arXiv:2311.16867): one matrix for Q, K and V, attention and MLP mostly side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.alibi import slopes
from fwk_models._common.qkv import GroupedQKV, JoinedQKV
from fwk_models._common.stack import MLP, Block, SelfAttention, Stack

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class Falcon(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        has_slopes = bool(raw.get("alibi", False))
        self.rotary = None if has_slopes else RotaryEmbedding(context)
        # Falcon adds slopes before it scales the scores.
        self.extras = slopes(context, config.head_size**-0.5) if has_slopes else None
        self.build(
            context,
            embedding=VocabEmbedding(context, "transformer.word_embeddings"),
            blocks=[self.block(context, index) for index in context.layers],
            norm=norm(context, "transformer.ln_f"),
            is_tied=bool(raw.get("tie_word_embeddings", True)),
            rotaries=[] if self.rotary is None else [self.rotary],
        )

    def block(self, context: ModelContext, index: int) -> Block:
        """Layer ``index``; models of the newer kind have a norm for each part, or one for both."""
        raw, prefix = context.config.raw, f"transformer.h.{index}"
        bias, is_new = bool(raw.get("bias", False)), bool(raw.get("new_decoder_architecture", False))
        name = f"{prefix}.self_attention.query_key_value"
        is_joined = context.config.num_kv_heads == 1  # one group: the same rows, and ranks may share its K and V
        qkv = JoinedQKV(context, name, bias=bias) if is_joined else GroupedQKV(context, name, bias=bias)
        output = f"{prefix}.self_attention.dense"
        attention = SelfAttention(context, index, qkv, output, rotary=self.rotary, bias=bias, extras=self.extras)
        function = str(raw.get("activation") or "gelu")
        mlp = MLP(context, f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h", function, bias=bias)
        is_parallel = is_new or bool(raw.get("parallel_attn", True))
        if is_new and raw.get("num_ln_in_parallel_attn", 2) in (2, None):
            before = (norm(context, f"{prefix}.ln_attn"), norm(context, f"{prefix}.ln_mlp"))
        else:
            first = norm(context, f"{prefix}.input_layernorm")
            before = (first, first if is_parallel else norm(context, f"{prefix}.post_attention_layernorm"))
        return Block(context, index, attention, mlp, before=before, is_parallel=is_parallel)


def norm(context: ModelContext, name: str) -> Apply:
    """A norm of the stream."""
    return LayerNorm(
        context, name, context.config.hidden_size, float(context.config.raw.get("layer_norm_epsilon") or 1e-5)
    )
