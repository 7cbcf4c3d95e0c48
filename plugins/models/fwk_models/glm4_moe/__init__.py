"""GLM-4.5 and 4.6."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ConfiguredSpec(
            name="glm4_moe",
            load="fwk_models.glm4_moe.model:Glm4Moe",
            architectures=("Glm4MoeForCausalLM",),
            defaults=DEFAULTS,
            names={"n_routed_experts": ("num_local_experts", "n_routed_experts")},
            summary="Half of each head turns; experts routed as in DeepSeek-V3, behind the first dense layers.",
        )
    ]
