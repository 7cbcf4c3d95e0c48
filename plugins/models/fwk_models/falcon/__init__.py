"""Falcon."""

from dataclasses import replace
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.interfaces.model import AttentionNeeds
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "FalconForCausalLM": {
        "vocab_size": 65_024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "layer_norm_epsilon": 1e-5, "alibi": False, "new_decoder_architecture": False, "multi_query": True,
        "parallel_attn": True, "bias": False, "max_position_embeddings": 2048, "eos_token_id": 11, "activation": "gelu",
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""
DEFAULTS["RWForCausalLM"] = DEFAULTS["FalconForCausalLM"]


class FalconSpec(ConfiguredSpec):
    """Counts K/V heads as the kinds of Falcon do; asks for slopes where positions are such."""

    def derived(self, config: Config, architecture: str) -> Config:
        heads = config["num_attention_heads"]
        if config["new_decoder_architecture"]:
            shared = config.get("num_kv_heads") or heads
        else:
            shared = 1 if config["multi_query"] else heads
        inner = config.get("ffn_hidden_size") or 4 * config["hidden_size"]
        return with_rope({**config, "num_key_value_heads": shared, "intermediate_size": inner})

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        return replace(needs, features=needs.features | {"alibi_slopes"}) if config.raw.get("alibi") else needs


@hookimpl
def models() -> list[ModelSpec]:
    return [
        FalconSpec(
            name="falcon",
            load="fwk_models.falcon.model:Falcon",
            architectures=(
                "FalconForCausalLM",
                "RWForCausalLM",
            ),
            defaults=DEFAULTS,
            names={
                "hidden_size": ("n_embed", "hidden_size"),
                "num_hidden_layers": ("n_layer",),
                "num_attention_heads": ("n_head",),
                "num_kv_heads": ("n_head_kv",),
            },
            summary="Attention and MLP side by side; one K/V head or groups of them; rotary positions or slopes.",
        ),
    ]
