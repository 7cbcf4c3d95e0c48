"""Qwen3.5, dense and with experts: Qwen3-Next's shape with projections of their own, and eyes in some."""

from collections.abc import Mapping
from typing import Any, cast

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.config import Config, ConfiguredSpec, with_attention_interval, with_rope
from fwk_models._common.nested import PLACES, language_model

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


EYES: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}  # fmt: skip
"""The same of ``vision_config``."""


class Qwen35Spec(ConfiguredSpec):
    """The language model of a model that also sees is in ``text_config``."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        found = super().normalised(language_model(raw, ties_outside=True))
        if not self.media:
            return found
        vision = raw.get("vision_config") or {}
        if not isinstance(vision, Mapping):
            raise ModelLoadError("config.json: 'vision_config' must be an object")
        kept = {key: raw[key] for key in PLACES if key in raw}
        return {**found, **kept, "vision_config": {**EYES, **cast("Mapping[str, Any]", vision)}}

    def derived(self, config: Config, architecture: str) -> Config:
        return with_rope(with_attention_interval(config))


@hookimpl
def models() -> list[ModelSpec]:
    common: dict[str, Any] = {
        "defaults": DEFAULTS,
        "optional": frozenset({"layer_types"}),
        "only": {"hidden_act": ("silu", "swish")},
        "is_recurrent": True,
    }
    return [
        Qwen35Spec(
            name="qwen3_5",
            load="fwk_models.qwen3_5.model:Qwen35",
            architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
            summary="Gated delta rules in most layers, gated attention in the others.",
            **common,
        ),
        Qwen35Spec(
            name="qwen3_5_vl",
            load="fwk_models.qwen3_5.model:SeeingQwen35",
            architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
            media=frozenset({"image", "video"}),
            summary="The same with an encoder of images in their own size, and positions of three planes.",
            **common,
        ),
    ]
