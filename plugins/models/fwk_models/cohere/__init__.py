"""Command R, Command R+, Command R7B, Aya."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": {
        "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "logit_scale": 0.0625,
        "num_hidden_layers": 40, "num_attention_heads": 64, "hidden_act": "silu", "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5, "eos_token_id": 255_001, "tie_word_embeddings": True, "attention_bias": False,
        "use_qk_norm": False, "rope_theta": 500000.0,
    },
    "Cohere2ForCausalLM": {
        "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "logit_scale": 0.0625,
        "num_hidden_layers": 40, "num_attention_heads": 64, "hidden_act": "silu", "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5, "eos_token_id": 255_001, "tie_word_embeddings": True, "attention_bias": False,
        "sliding_window": 4096, "sliding_window_pattern": 4,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class CohereSpec(ConfiguredSpec):
    """Command R7B has a window in three of four layers."""

    def derived(self, config: Config, architecture: str) -> Config:
        if architecture == "CohereForCausalLM":
            config.pop("layer_types", None)
        elif config.get("layer_types") is None:
            pattern = number_of(config, "sliding_window_pattern")
            config["layer_types"] = every_nth(number_of(config, "num_hidden_layers"), pattern)
        return with_rope(config)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        CohereSpec(
            name="cohere",
            load="fwk_models.cohere.model:Cohere",
            architectures=(
                "CohereForCausalLM",
                "Cohere2ForCausalLM",
            ),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            summary="Attention and MLP side by side below one norm; Command R7B has windows.",
        ),
    ]
