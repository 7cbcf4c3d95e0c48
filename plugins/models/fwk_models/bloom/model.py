"""BLOOM (arXiv:2211.05100): attention with linear biases, a norm behind the embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, VocabEmbedding
from fwk_models._common.alibi import slopes
from fwk_models._common.qkv import GroupedQKV
from fwk_models._common.stack import MLP, Block, SelfAttention, Stack, root_of

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class Bloom(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        if raw.get("apply_residual_connection_post_layernorm"):
            raise ModelLoadError("bloom: 'apply_residual_connection_post_layernorm' is not computed")
        root, extras = root_of(context, "transformer.", "word_embeddings.weight"), slopes(context)

        def norm(name: str) -> Apply:
            return LayerNorm(context, f"{root}{name}", config.hidden_size, float(raw.get("layer_norm_epsilon") or 1e-5))

        def block(index: int) -> Block:
            prefix = f"{root}h.{index}"
            qkv = GroupedQKV(context, f"{prefix}.self_attention.query_key_value", bias=True)
            output = f"{prefix}.self_attention.dense"
            attention = SelfAttention(context, index, qkv, output, bias=True, extras=extras)
            names = (f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h")
            mlp = MLP(context, *names, "gelu_pytorch_tanh", bias=True)
            before = (norm(f"h.{index}.input_layernorm"), norm(f"h.{index}.post_attention_layernorm"))
            return Block(context, index, attention, mlp, before=before)

        self.build(
            context,
            embedding=VocabEmbedding(context, f"{root}word_embeddings"),
            embedding_norm=norm("word_embeddings_layernorm"),
            blocks=[block(index) for index in context.layers],
            norm=norm("ln_f"),
            is_tied=bool(raw.get("tie_word_embeddings", True)),
        )
