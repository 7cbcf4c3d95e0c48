"""Qwen3.5, dense and with experts: Qwen3-Next's shape with projections of their own. Images are not taken."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, with_attention_interval, with_rope
from fwk_models._common.nested import language_model

DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {
        "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
    },
    "Qwen3_5MoeForCausalLM": {
        "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False, "head_dim": 256, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8, "num_experts": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""
DEFAULTS["Qwen3_5ForConditionalGeneration"] = DEFAULTS["Qwen3_5ForCausalLM"]
DEFAULTS["Qwen3_5MoeForConditionalGeneration"] = DEFAULTS["Qwen3_5MoeForCausalLM"]


class Qwen35Spec(ConfiguredSpec):
    """The language model of a model that also sees is in ``text_config``."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return super().normalised(language_model(raw, ties_outside=True))

    def derived(self, config: Config, architecture: str) -> Config:
        return with_rope(with_attention_interval(config))


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen35Spec(
            name="qwen3_5",
            load="fwk_models.qwen3_5.model:Qwen35",
            architectures=(
                "Qwen3_5ForCausalLM",
                "Qwen3_5MoeForCausalLM",
                "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration",
            ),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            only={"hidden_act": ("silu", "swish")},
            is_recurrent=True,
            summary="Gated delta rules in most layers, gated attention in the others; text only.",
        )
    ]
