"""OLMo 2 and OLMo 3."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_rope, with_two_ropes

DEFAULTS: dict[str, dict[str, Any]] = {
    "Olmo2ForCausalLM": {
        "vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "eos_token_id": 50_279,
        "tie_word_embeddings": False, "attention_bias": False, "rms_norm_eps": 1e-5,
    },
    "Olmo3ForCausalLM": {
        "vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "eos_token_id": 50_279,
        "tie_word_embeddings": False, "attention_bias": False, "rms_norm_eps": 1e-5, "sliding_window": 4096,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class OlmoSpec(ConfiguredSpec):
    """OLMo 3 has a window in three of four layers, and stretches angles in the others."""

    def derived(self, config: Config, architecture: str) -> Config:
        if architecture == "Olmo2ForCausalLM":
            config.pop("layer_types", None)
            return with_rope(config)
        if config.get("layer_types") is None:
            config["layer_types"] = every_nth(number_of(config, "num_hidden_layers"), 4)
        return with_two_ropes(config, theta=500_000.0, local_theta=500_000.0)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        OlmoSpec(
            name="olmo2",
            load="fwk_models.olmo2.model:Olmo2",
            architectures=(
                "Olmo2ForCausalLM",
                "Olmo3ForCausalLM",
            ),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            summary="Norms behind attention and MLP; queries and keys normalised over all heads.",
        ),
    ]
