"""gpt-oss."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {
        "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201_088, "hidden_size": 2880,
        "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "sliding_window": 128, "tie_word_embeddings": False, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "attention_bias": True, "rope_theta": 150000.0,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssSpec(ConfiguredSpec):
    """A window in every second layer, and stretched angles."""

    def derived(self, config: Config, architecture: str) -> Config:
        if config.get("layer_types") is None:
            config["layer_types"] = every_nth(number_of(config, "num_hidden_layers"), 2)
        config["rope_parameters"] = config.get("rope_parameters", dict(YARN))
        return with_rope(config)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        GptOssSpec(
            name="gpt_oss",
            load="fwk_models.gpt_oss.model:GptOss",
            architectures=("GptOssForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            names={"num_local_experts": ("num_experts", "num_local_experts")},
            features=frozenset({"sinks"}),
            summary="Experts (MXFP4 or plain), attention with sinks, a window in every second layer.",
        )
    ]
