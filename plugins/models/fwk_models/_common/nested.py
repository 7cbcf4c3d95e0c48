"""Configs of models that also see: that of their language model is nested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fwk.errors import ModelLoadError

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
"""What transformers' Llama has where a config does not say."""


def language_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """``text_config`` with what stands around it, under the architecture's name; a config of text alone as it is."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return raw
    outer = {key: raw[key] for key in ("tie_word_embeddings", "eos_token_id", "dtype") if key in raw}
    return {**outer, **text, "architectures": raw.get("architectures")}


def llama_with_images(raw: Mapping[str, Any], name: str, **defaults: Any) -> Mapping[str, Any]:
    """The config of a model that takes images, as that of its Llama with ``vision_config`` and all else around it.

    name: the plugin's. defaults: in place of Llama's. Raises ``ModelLoadError`` for another text model.
    """
    text, vision = raw.get("text_config"), raw.get("vision_config")
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        raise ModelLoadError("config.json: 'text_config' and 'vision_config' must be objects")
    kind = text.get("model_type", "llama")
    if kind != "llama":
        raise ModelLoadError(f"config.json: text_config's 'model_type' is {kind!r}; {name} computes 'llama'")
    outer = {key: raw[key] for key in ("architectures", "eos_token_id", "dtype") if raw.get(key) is not None}
    tied = raw.get("tie_word_embeddings", False)
    return {**_LLAMA, **defaults, **raw, **text, "tie_word_embeddings": tied, **outer}
