"""SmolLM3."""

from typing import Any, cast

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "SmolLM3ForCausalLM": {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "eos_token_id": 128_001, "use_sliding_window": False, "no_rope_layer_interval": 4,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "rope_theta": 2000000.0,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class SmolLM3Spec(ConfiguredSpec):
    """Layers without positions may have windows."""

    def derived(self, config: Config, architecture: str) -> Config:
        count, window = number_of(config, "num_hidden_layers"), config.get("sliding_window")
        window = window if config["use_sliding_window"] else None
        if config.get("no_rope_layers") is None:
            kinds = every_nth(count, number_of(config, "no_rope_layer_interval"))
            config["no_rope_layers"] = [int(kind != "full_attention") for kind in kinds]
        turns = config["no_rope_layers"]
        if not isinstance(turns, list) or len(cast("list[Any]", turns)) < count:
            raise ModelLoadError(f"config.json: 'no_rope_layers' must have a number for each of the {count} layers")
        if config.get("layer_types") is None:
            has_window = [window is not None and not turn for turn in cast("list[Any]", turns)[:count]]
            config["layer_types"] = ["sliding_attention" if has else "full_attention" for has in has_window]
        return with_rope({**config, "sliding_window": window})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        SmolLM3Spec(
            name="smollm3",
            load="fwk_models.smollm3.model:SmolLM3",
            architectures=("SmolLM3ForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types", "sliding_window"}),
            summary="Llama's shape; every fourth layer has no positions.",
        ),
    ]
