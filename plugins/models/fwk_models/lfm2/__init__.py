"""LFM2: short convolutions in most layers, attention in the others."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, number_of, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": {
        "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
        "eos_token_id": 2, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "rope_theta": 1000000.0,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class Lfm2Spec(ConfiguredSpec):
    """Its config names the norms' epsilon, the tie and the layers' kinds otherwise."""

    def derived(self, config: Config, architecture: str) -> Config:
        if config.get("layer_types") is None:
            full, count = config.get("full_attn_idxs"), number_of(config, "num_hidden_layers")
            config["layer_types"] = [
                "full_attention" if full is None or index in full else "conv" for index in range(count)
            ]
        return with_rope({**config, "rms_norm_eps": config["norm_eps"]})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Lfm2Spec(
            name="lfm2",
            load="fwk_models.lfm2.model:Lfm2",
            architectures=("Lfm2ForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types", "sliding_window"}),
            names={
                "intermediate_size": ("block_ff_dim", "intermediate_size"),
                "norm_eps": ("norm_eps", "rms_norm_eps"),
                "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings"),
            },
            is_recurrent=True,
            summary="Gated short convolutions in most layers, attention in the others.",
        )
    ]
