"""Config of the language model within one that also sees or hears, by its own kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from fwk.errors import ModelLoadError
from fwk_models._common.config import Config, completed, with_later_windows, with_rope
from fwk_models._common.nested import LLAMA

TABLES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "eos_token_id": 2, "tie_word_embeddings": False, "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    },
}  # fmt: skip
"""By ``model_type`` of ``text_config``, what its class has where a file says nothing."""


def with_text(raw: Mapping[str, Any], name: str, kinds: tuple[str, ...], *, ties: bool, asks_text: bool) -> Config:
    """``text_config``, complete, with all that stands around it; ``text_kind`` is its kind.

    name: the plugin's. kinds: those that it computes, the class's own first. ties: whether the head is the embedding
    where nothing says so. asks_text: the text model's config may say that, too. Raises ``ModelLoadError``.
    """
    text = raw.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ModelLoadError("config.json: 'text_config' must be an object")
    text = dict(cast("Mapping[str, Any]", text))
    kind = str(text.get("model_type") or kinds[0])
    if kind not in kinds:
        raise ModelLoadError(
            f"config.json: text_config's 'model_type' is {kind!r}; {name} computes {' or '.join(map(repr, kinds))}"
        )
    found = completed(text, TABLES[kind], frozenset({"layer_types", "head_dim"}))
    found = with_rope(with_later_windows(found) if kind in ("qwen2", "qwen3") else found)
    outer = {key: raw[key] for key in ("architectures", "eos_token_id", "dtype") if raw.get(key) is not None}
    said = raw.get("tie_word_embeddings")
    tied = bool(ties if said is None else said) or (asks_text and bool(text.get("tie_word_embeddings")))
    return {**raw, **found, "text_kind": kind, "tie_word_embeddings": tied, **outer}
