"""GLM-4."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "GlmForCausalLM": {
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7, "tie_word_embeddings": False,
        "attention_bias": True, "eos_token_id": [151_329, 151_336, 151_338], "partial_rotary_factor": 0.5,
    },
    "Glm4ForCausalLM": {
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7, "tie_word_embeddings": False,
        "attention_bias": True, "eos_token_id": [151_329, 151_336, 151_338], "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class GlmSpec(ConfiguredSpec):
    """An answer ends by the same three tokens where a file names none."""

    def derived(self, config: Config, architecture: str) -> Config:
        if "eos_token_id" in config and config["eos_token_id"] is None:
            config["eos_token_id"] = DEFAULTS[architecture]["eos_token_id"]
        return with_rope(config)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        GlmSpec(
            name="glm4",
            load="fwk_models.glm4.model:Glm4",
            architectures=(
                "GlmForCausalLM",
                "Glm4ForCausalLM",
            ),
            defaults=DEFAULTS,
            summary="Rotary positions on half of each head, neighbours as pairs; GLM-4-0414 has norms on both sides.",
        ),
    ]
