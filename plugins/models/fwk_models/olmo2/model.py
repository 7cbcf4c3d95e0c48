"""OLMo 2 and 3 (arXiv:2501.00656): norms behind each part, and over all heads of Q and K at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, RMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.norms import WholeNorm
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, SelfAttention, Stack, unchanged

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class Olmo2(Stack):
    """Token ids to hidden states to logits. OLMo 3 has windows in most layers, and stretches angles in the others."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        bias = bool(config.raw.get("attention_bias", False))
        embedding = VocabEmbedding(context, "model.embed_tokens")
        kinds = sorted({config.layer_type(index) for index in range(config.num_layers)})
        rotaries = {kind: RotaryEmbedding(context, rope=config.rope_of(kind)) for kind in kinds}

        def norm(name: str) -> Apply:
            return RMSNorm(context, name, config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            prefix = f"model.layers.{index}"
            attention = SelfAttention(
                context,
                index,
                SplitQKV(context, f"{prefix}.self_attn", bias=bias),
                f"{prefix}.self_attn.o_proj",
                rotary=rotaries[config.layer_type(index)],
                norm=WholeNorm(context, f"{prefix}.self_attn"),
                bias=bias,
                sliding_window=config.window_of(index),
            )
            after = (norm(f"{prefix}.post_attention_layernorm"), norm(f"{prefix}.post_feedforward_layernorm"))
            mlp = GatedMLP(context, f"{prefix}.mlp")
            return Block(context, index, attention, mlp, before=(unchanged, unchanged), after=after)

        blocks = [block(index) for index in context.layers]
        turning = list(rotaries.values())
        self.build(context, embedding=embedding, blocks=blocks, norm=norm("model.norm"), rotaries=turning)
