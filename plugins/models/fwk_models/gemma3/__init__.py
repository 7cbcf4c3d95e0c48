"""Gemma 3, text only."""

from dataclasses import replace
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.interfaces.model import AttentionNeeds
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_two_ropes

DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": True,
        "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class Gemma3Spec(ConfiguredSpec):
    """Asks for soft caps where the config has one; says which layers have windows, as older configs do not."""

    def derived(self, config: Config, architecture: str) -> Config:
        if config.get("layer_types") is None:
            pattern = number_of(config, "sliding_window_pattern")
            config["layer_types"] = every_nth(number_of(config, "num_hidden_layers"), pattern)
        return with_two_ropes(config, theta=1_000_000.0, local_theta=10_000.0)

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        if config.raw.get("attn_logit_softcapping") is None:
            return needs
        return replace(needs, features=needs.features | {"soft_cap"})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Gemma3Spec(
            name="gemma3",
            load="fwk_models.gemma3.model:Gemma3",
            architectures=("Gemma3ForCausalLM",),
            defaults=DEFAULTS,
            only={"use_bidirectional_attention": (False,)},
            optional=frozenset(
                {"attn_logit_softcapping", "final_logit_softcapping", "layer_types", "rope_local_base_freq"}
            ),
            summary="Sliding-window and global layers in turn, each kind with its own rotary base.",
        )
    ]
