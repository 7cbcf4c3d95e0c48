"""Configs of models that also see: that of their language model is nested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def language_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """``text_config`` with what stands around it, under the architecture's name; a config of text alone as it is."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return raw
    outer = {key: raw[key] for key in ("tie_word_embeddings", "eos_token_id", "dtype") if key in raw}
    return {**outer, **text, "architectures": raw.get("architectures")}
