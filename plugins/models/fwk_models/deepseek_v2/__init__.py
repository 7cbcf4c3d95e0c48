"""DeepSeek-V2 and V3: latent attention, shared and routed experts."""

from dataclasses import replace
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.interfaces.model import AttentionNeeds
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 64,
        "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "norm_topk_prob": False, "v_head_dim": 128, "moe_intermediate_size": 1407,
    },
    "DeepseekV3ForCausalLM": {
        "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
        "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": False,
        "rope_interleave": True, "attention_bias": False,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class DeepseekV2Spec(ConfiguredSpec):
    """What the cache keeps of a token is one latent for all heads, and its rotated part."""

    def derived(self, config: Config, architecture: str) -> Config:
        return with_rope({**config, "head_dim": config["qk_rope_head_dim"]})

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
            defaults=DEFAULTS,
            optional=frozenset({"sliding_window"}),
            names={"n_routed_experts": ("num_experts", "n_routed_experts")},
            features=frozenset({"latent"}),
            summary="Latent attention in its absorbed form; a mixture of experts with shared ones.",
        ),
        DeepseekV2Spec(
            name="deepseek_v3",
            load="fwk_models.deepseek_v2.model:DeepseekV3",
            architectures=("DeepseekV3ForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"sliding_window"}),
            names={"n_routed_experts": ("num_local_experts", "n_routed_experts")},
            features=frozenset({"latent"}),
            summary="DeepSeek-V2's shape; experts chosen by sigmoids, groups and a bias.",
        ),
    ]
