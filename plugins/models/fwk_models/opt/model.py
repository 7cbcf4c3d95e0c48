"""OPT (arXiv:2205.01068)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, VocabEmbedding
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import MLP, Block, SelfAttention, Stack, root_of

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply

FIRST_POSITION = 2
"""Rows of the table of positions that no token uses."""


class OPT(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        narrow = raw.get("word_embed_proj_dim", config.hidden_size) != config.hidden_size
        if narrow or not raw.get("do_layer_norm_before", True) or raw.get("_remove_final_layer_norm"):
            raise ModelLoadError(
                "opt: norms behind each part, and embeddings narrower than the model (OPT-350M), are not computed"
            )
        bias = bool(raw.get("enable_bias", True))
        root = root_of(context, "model.", "decoder.embed_tokens.weight") + "decoder."
        shape = (config.max_position_embeddings + FIRST_POSITION, config.hidden_size)
        positions = context.weights.tensor(f"{root}embed_positions.weight", shape)[FIRST_POSITION:]
        has_weights = bool(raw.get("layer_norm_elementwise_affine", True))

        def norm(name: str) -> Apply:
            if not has_weights:
                raise ModelLoadError("opt: norms without weights are not computed")
            return LayerNorm(context, f"{root}{name}", config.hidden_size, 1e-5)

        def block(index: int) -> Block:
            prefix = f"{root}layers.{index}"
            qkv = SplitQKV(context, f"{prefix}.self_attn", bias=bias)
            attention = SelfAttention(context, index, qkv, f"{prefix}.self_attn.out_proj", bias=bias)
            function = str(raw.get("activation_function") or "relu")
            mlp = MLP(context, f"{prefix}.fc1", f"{prefix}.fc2", function, bias=bias)
            before = (norm(f"layers.{index}.self_attn_layer_norm"), norm(f"layers.{index}.final_layer_norm"))
            return Block(context, index, attention, mlp, before=before)

        self.build(
            context,
            embedding=VocabEmbedding(context, f"{root}embed_tokens"),
            blocks=[block(index) for index in context.layers],
            norm=norm("final_layer_norm"),
            is_tied=bool(raw.get("tie_word_embeddings", True)),
            positions=positions.to(context.device, context.dtype),
        )
