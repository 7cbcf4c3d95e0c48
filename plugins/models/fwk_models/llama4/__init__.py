"""Llama 4, text only."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_rope
from fwk_models._common.nested import language_model

DEFAULTS: dict[str, dict[str, Any]] = {
    "Llama4ForCausalLM": {
        "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "eos_token_id": 2,
        "tie_word_embeddings": False, "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1,
        "use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
        "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False, "rope_theta": 500000.0,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""
DEFAULTS["Llama4ForConditionalGeneration"] = DEFAULTS["Llama4ForCausalLM"]


class Llama4Spec(ConfiguredSpec):
    """The language model is in ``text_config``. Most layers see a chunk of the text only: one chunk is served."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return super().normalised(language_model(raw, ties_outside=False))

    def derived(self, config: Config, architecture: str) -> Config:
        if config["num_experts_per_tok"] != 1:
            raise ModelLoadError(
                f"config.json: num_experts_per_tok {config['num_experts_per_tok']}: Llama 4 gives each token one expert"
            )
        longest, chunk = number_of(config, "max_position_embeddings", high=2**31), config["attention_chunk_size"]
        count = number_of(config, "num_hidden_layers")
        turning = every_nth(count, number_of(config, "no_rope_layer_interval"))
        found = {
            "max_position_embeddings": min(longest, chunk or longest),
            "layer_types": ["full_attention"] * count,
            "no_rope_layers": config.get("no_rope_layers") or [int(kind != "full_attention") for kind in turning],
        }
        if config.get("moe_layers") is None:
            step = number_of(config, "interleave_moe_layer_step")
            found["moe_layers"] = list(range(step - 1, count, step))
        return {**with_rope(config), **found}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Llama4Spec(
            name="llama4",
            load="fwk_models.llama4.model:Llama4",
            architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            summary="A shared and one routed expert; some layers without positions; contexts of one chunk; text only.",
        )
    ]
