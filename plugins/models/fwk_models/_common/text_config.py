"""Config of the language model within one that also sees or hears, by its own kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from fwk.errors import ModelLoadError
from fwk_models._common.config import Config, completed, with_later_windows, with_rope
from fwk_models.llama import DEFAULTS as LLAMAS
from fwk_models.qwen3 import DEFAULTS as QWENS

TABLES: dict[str, dict[str, Any]] = {
    "llama": LLAMAS["LlamaForCausalLM"],
    "mistral": LLAMAS["MistralForCausalLM"],
    "qwen2": LLAMAS["Qwen2ForCausalLM"],
    "qwen3": QWENS["Qwen3ForCausalLM"],
}
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
