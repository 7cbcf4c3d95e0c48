"""GLM-4: half of each head turns, pairs are neighbours; the models of April 2025 normalise behind each part, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import RMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, JoinedGatedMLP, SelfAttention, Stack, unchanged

if TYPE_CHECKING:
    from fwk_models._common.stack import Apply


class Glm4(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        embedding = VocabEmbedding(context, "model.embed_tokens")
        rotary = RotaryEmbedding(context, is_interleaved=True)

        def norm(name: str) -> Apply:
            return RMSNorm(context, name, config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            prefix = f"model.layers.{index}"
            attention = SelfAttention(
                context,
                index,
                SplitQKV(context, f"{prefix}.self_attn", bias=bool(raw.get("attention_bias", False))),
                f"{prefix}.self_attn.o_proj",
                rotary=rotary,
            )
            function = str(raw.get("hidden_act") or "silu")
            mlp = JoinedGatedMLP(context, f"{prefix}.mlp.gate_up_proj", f"{prefix}.mlp.down_proj", function)
            before = (norm(f"{prefix}.input_layernorm"), norm(f"{prefix}.post_attention_layernorm"))
            after: tuple[Apply, Apply] = (unchanged, unchanged)
            if config.architecture == "Glm4ForCausalLM":
                after = (norm(f"{prefix}.post_self_attn_layernorm"), norm(f"{prefix}.post_mlp_layernorm"))
            return Block(context, index, attention, mlp, before=before, after=after)

        blocks = [block(index) for index in context.layers]
        self.build(context, embedding=embedding, blocks=blocks, norm=norm("model.norm"), rotaries=[rotary])
