"""GPT-2: learned positions, and matrices stored the other way round."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, VocabEmbedding
from fwk_models._common.qkv import JoinedQKV
from fwk_models._common.stack import MLP, Block, SelfAttention, Stack, root_of
from fwk_models._common.weights import Transposed

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


class GPT2(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        if raw.get("scale_attn_by_inverse_layer_idx") or not raw.get("scale_attn_weights", True):
            raise ModelLoadError("gpt2: scores scaled by layer, or not at all, are not computed")
        if raw.get("stores_conv1d", True):  # GGUF files do not
            context = replace(context, weights=Transposed(context.weights, CONV1D))
        root = root_of(context, "transformer.", "wte.weight")
        place = (context.device, context.dtype)
        shape = (config.max_position_embeddings, config.hidden_size)
        positions = context.weights.tensor(f"{root}wpe.weight", shape).to(*place)
        function = str(raw.get("activation_function") or "gelu_new")

        def norm(name: str) -> Apply:
            return LayerNorm(context, name, config.hidden_size, float(raw.get("layer_norm_epsilon") or 1e-5))

        def block(index: int) -> Block:
            prefix = f"{root}h.{index}"
            for buffer in ("attn.bias", "attn.masked_bias"):
                context.weights.skip(f"{prefix}.{buffer}")
            qkv = JoinedQKV(context, f"{prefix}.attn.c_attn", bias=True)
            attention = SelfAttention(context, index, qkv, f"{prefix}.attn.c_proj", bias=True)
            mlp = MLP(context, f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj", function, bias=True)
            return Block(context, index, attention, mlp, before=(norm(f"{prefix}.ln_1"), norm(f"{prefix}.ln_2")))

        self.build(
            context,
            embedding=VocabEmbedding(context, f"{root}wte"),
            blocks=[block(index) for index in context.layers],
            norm=norm(f"{root}ln_f"),
            is_tied=bool(raw.get("tie_word_embeddings", True)),
            positions=positions,
        )
