"""Configs of models that also see: that of their language model is nested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from fwk.errors import ModelLoadError
from fwk_models._common.config import Config, ConfiguredSpec, completed, with_rope

PLACES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
"""Ids of the tokens around images and videos, and in their places, of the Qwen-VL family."""

LLAMA: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
"""What transformers' Llama has where a config does not say."""

PIXTRAL: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
"""What transformers' class of Pixtral's ``vision_config`` has where a file says nothing."""

SIGLIP: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
"""What transformers' class of SigLIP's ``vision_config`` has where a file says nothing."""


def language_model(raw: Mapping[str, Any], *, ties_outside: bool) -> Mapping[str, Any]:
    """``text_config`` with what stands around it, under the architecture's name; a config of text alone as it is.

    ties_outside: it is the config around it that says whether the head is the embedding, and not the inner one.
    """
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return raw
    outer = {key: raw[key] for key in ("eos_token_id", "dtype") if key in raw}
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings")} if ties_outside else {}
    return {**outer, **text, **tied, "architectures": raw.get("architectures")}


def vision_of(raw: Mapping[str, Any], name: str, eyes: Mapping[str, Any], kind: str) -> Config:
    """``vision_config``, complete. eyes: what it is where it does not say. kind: the ``model_type`` that is computed.

    name: the plugin's. Raises ``ModelLoadError`` for another.
    """
    vision = raw.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelLoadError("config.json: 'vision_config' must be an object")
    found = {**eyes, **cast("Mapping[str, Any]", vision)}
    if (given := found.get("model_type", kind)) != kind:
        raise ModelLoadError(f"config.json: vision_config's 'model_type' is {given!r}; {name} computes {kind!r}")
    return found


def llama_with_images(
    raw: Mapping[str, Any], name: str, eyes: Mapping[str, Any], *, asks_text: bool = False
) -> Mapping[str, Any]:
    """The config of a model that takes images, as that of its Llama with ``vision_config`` and all else around it.

    name: the plugin's. eyes: ``vision_config`` where it does not say. asks_text: the text model's config may say
    that its head is the embedding. Raises ``ModelLoadError`` for another text model.
    """
    text, vision = raw.get("text_config"), raw.get("vision_config")
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        raise ModelLoadError("config.json: 'text_config' and 'vision_config' must be objects")
    kind = text.get("model_type", "llama")
    if kind != "llama":
        raise ModelLoadError(f"config.json: text_config's 'model_type' is {kind!r}; {name} computes 'llama'")
    outer = {key: raw[key] for key in ("architectures", "eos_token_id", "dtype") if raw.get(key) is not None}
    llama = with_rope(completed(dict(cast("Mapping[str, Any]", text)), LLAMA))
    tied = bool(raw.get("tie_word_embeddings")) or (asks_text and bool(llama["tie_word_embeddings"]))
    return {**raw, **llama, "vision_config": {**eyes, **vision}, "tie_word_embeddings": tied, **outer}


@dataclass(frozen=True, kw_only=True)
class PlanesSpec(ConfiguredSpec):
    """``ModelSpec`` of a decoder whose positions have three planes, with an encoder of images.

    The decoder's config is nested, or that of the encoder stands in it, as it was written before transformers 5.
    """

    theta: ClassVar[float]
    asks_text: ClassVar[bool] = False
    """Whether the decoder's config, too, may say that its head is the embedding."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        vision = raw.get("vision_config")
        if not isinstance(vision, Mapping):
            raise ModelLoadError("config.json: 'vision_config' must be an object")
        flat = language_model(raw, ties_outside=True) if "text_config" in raw else raw
        text = cast("Mapping[str, Any]", raw.get("text_config") or {})
        kept = {key: raw[key] for key in (*PLACES, "architectures") if key in raw}
        ties = bool(raw.get("tie_word_embeddings") or (self.asks_text and text.get("tie_word_embeddings")))
        vision = self.vision(cast("Mapping[str, Any]", vision), str(cast("list[Any]", raw["architectures"])[0]))
        config = {**flat, **kept, "tie_word_embeddings": ties, "vision_config": vision}
        return super().normalised(config)

    def vision(self, raw: Mapping[str, Any], architecture: str) -> Config:
        """``vision_config``, complete."""
        raise NotImplementedError

    def derived(self, config: Config, architecture: str) -> Config:
        for name in ("rope_scaling", "rope_parameters"):
            rope = cast("Mapping[str, Any] | None", config.get(name))
            if isinstance(rope, Mapping) and "mrope" in (rope.get("rope_type"), rope.get("type")):
                config[name] = {**{key: rope[key] for key in rope if key != "type"}, "rope_type": "default"}
        config["rope_theta"] = config.get("rope_theta") or self.theta
        return with_rope(config)
