"""Phi-3, Phi-3.5 and Phi-4."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": {
        "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "eos_token_id": 32_000, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class Phi3Spec(ConfiguredSpec):
    """The length of training stands outside the rotary settings, and those have had other names."""

    def derived(self, config: Config, architecture: str) -> Config:
        config = with_rope(config)
        rope = config["rope_parameters"]
        if rope["rope_type"] in ("llama3", "yarn", "longrope"):
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        if rope["rope_type"] in ("su", "yarn"):
            rope["rope_type"] = "longrope"
        return config


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Phi3Spec(
            name="phi3",
            load="fwk_models.phi3.model:Phi3",
            architectures=("Phi3ForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"sliding_window"}),
            summary="Llama's shape with fused matrices; LongRoPE.",
        ),
    ]
