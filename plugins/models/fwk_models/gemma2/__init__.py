"""Gemma and Gemma 2."""

from dataclasses import replace
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.interfaces.model import AttentionNeeds
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {
        "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "Gemma2ForCausalLM": {
        "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": True,
        "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class GemmaSpec(ConfiguredSpec):
    """Older configs call the function "gelu" and mean its approximation."""

    def derived(self, config: Config, architecture: str) -> Config:
        function = "gelu_pytorch_tanh" if config["hidden_act"] == "gelu" else config["hidden_act"]
        return with_rope({**config, "hidden_act": function, "hidden_activation": function})


class Gemma2Spec(ConfiguredSpec):
    """Asks for soft caps where the config has one; says which layers have windows, as older configs do not."""

    def derived(self, config: Config, architecture: str) -> Config:
        if config.get("layer_types") is None:
            config["layer_types"] = every_nth(number_of(config, "num_hidden_layers"), 2)
        return with_rope(config)

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        if config.raw.get("attn_logit_softcapping") is None:
            return needs
        return replace(needs, features=needs.features | {"soft_cap"})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        GemmaSpec(
            name="gemma",
            load="fwk_models.gemma2.model:Gemma",
            architectures=("GemmaForCausalLM",),
            defaults=DEFAULTS,
            only={"use_bidirectional_attention": (False,)},
            summary="Llama's shape with scaled embeddings and norms that add one.",
        ),
        Gemma2Spec(
            name="gemma2",
            load="fwk_models.gemma2.model:Gemma2",
            architectures=("Gemma2ForCausalLM",),
            defaults=DEFAULTS,
            only={"use_bidirectional_attention": (False,)},
            optional=frozenset({"layer_types"}),
            summary="Windows in every second layer, soft caps on scores and logits.",
        ),
    ]
