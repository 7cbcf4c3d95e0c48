"""DeepSeek-V2 and V3: latent attention, shared and routed experts."""

from dataclasses import replace

from fwk import ModelSpec, hookimpl
from fwk.interfaces.model import AttentionNeeds
from fwk.types import ModelConfig


class DeepseekV2Spec(ModelSpec):
    """What the cache keeps of a token is one latent for all heads, and its rotated part."""

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        size = config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")
        return replace(needs, head_size=size, num_kv_heads=1)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        DeepseekV2Spec(
            name="deepseek_v2",
            load="fwk_models.deepseek_v2.model:DeepseekV2",
            architectures=("DeepseekV2ForCausalLM",),
            features=frozenset({"latent"}),
            summary="Latent attention in its absorbed form; a mixture of experts with shared ones.",
        ),
        DeepseekV2Spec(
            name="deepseek_v3",
            load="fwk_models.deepseek_v2.model:DeepseekV3",
            architectures=("DeepseekV3ForCausalLM",),
            features=frozenset({"latent"}),
            summary="DeepSeek-V2's shape; experts chosen by sigmoids, groups and a bias.",
        ),
    ]
