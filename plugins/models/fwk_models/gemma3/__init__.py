"""Gemma 3, of text alone and with images."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk.interfaces.model import AttentionNeeds
from fwk.interfaces.multimodal import MEDIA_SPAN
from fwk.types import ModelConfig
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_two_ropes
from fwk_models._common.nested import SIGLIP, language_model, vision_of

DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": True,
        "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""
DEFAULTS["Gemma3ForConditionalGeneration"] = DEFAULTS["Gemma3ForCausalLM"]
PLACES: dict[str, int] = {
    "mm_tokens_per_image": 256, "boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144,
}  # fmt: skip
"""The same of the config around that of the language model."""


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


class SeeingGemma3Spec(Gemma3Spec):
    """The language model's config is nested. An image's tokens see each other, as a tree of drafts may."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        text = cast("Mapping[str, Any]", raw.get("text_config") or {})
        if (kind := text.get("model_type", "gemma3_text")) != "gemma3_text":
            raise ModelLoadError(
                f"config.json: text_config's 'model_type' is {kind!r}; gemma3_vl computes 'gemma3_text'"
            )
        eyes = vision_of(raw, "gemma3_vl", SIGLIP, "siglip_vision_model")
        found = super().normalised(language_model({**raw, "text_config": text}, ties_outside=True))
        places = {
            name: number_of(dict(raw), name, 0, 2**24) if raw.get(name) is not None else PLACES[name] for name in PLACES
        }
        return {**found, **places, "vision_config": eyes, MEDIA_SPAN: places["mm_tokens_per_image"]}

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        return replace(needs, features=needs.features | {"tree_mask"})


@hookimpl
def models() -> list[ModelSpec]:
    optional = frozenset({"attn_logit_softcapping", "final_logit_softcapping", "layer_types", "rope_local_base_freq"})
    common: dict[str, Any] = {
        "defaults": DEFAULTS,
        "only": {"use_bidirectional_attention": (False,)},
        "optional": optional,
    }
    return [
        Gemma3Spec(
            name="gemma3",
            load="fwk_models.gemma3.model:Gemma3",
            architectures=("Gemma3ForCausalLM",),
            summary="Sliding-window and global layers in turn, each kind with its own rotary base.",
            **common,
        ),
        SeeingGemma3Spec(
            name="gemma3_vl",
            load="fwk_models.gemma3.model:SeeingGemma3",
            architectures=("Gemma3ForConditionalGeneration",),
            media=frozenset({"image"}),
            summary="The same with SigLIP's encoder of images, whose tokens see each other.",
            **common,
        ),
    ]
