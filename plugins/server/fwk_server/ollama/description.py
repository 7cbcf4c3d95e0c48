"""What the API tells of a served model: its files, its shape and what it can do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fwk.errors import FwkError
from fwk.interfaces.dialect import Frontend, ModelCard
from fwk.interfaces.loader import WeightsSummary
from fwk.interfaces.served_weights import ServedWeights
from fwk_server._common.chat.served import capabilities

INTERFACE_VERSION = "0.12.11"
"""Ollama's first version with all that is answered here. Editors ask for it, and talk to no older one than 0.6.4."""

_SHAPE = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Keys of GGUF's metadata behind the architecture's name, and what config.json calls them."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model's weights, as they are served now. ``digest`` tells them from others; it is of no file's bytes."""

    family: str
    summary: WeightsSummary
    digest: str
    config: Mapping[str, Any]
    context_length: int

    def details(self) -> dict[str, Any]:
        """``details`` of the lists and of /api/show."""
        width = self.config.get("hidden_size")
        return {
            "parent_model": "",
            "format": self.summary.format,
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": _counted(self.summary.num_parameters),
            "quantization_level": self.summary.precision,
            "context_length": self.context_length,
            **({"embedding_length": width} if type(width) is int else {}),
        }


class Descriptions:
    """Those of the served models, each read once for its weights."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[ServedWeights | None, Description]] = {}

    def of(self, frontend: Frontend) -> Description:
        """Reads headers of files: call it off the event loop."""
        name, weights = frontend.card.name, frontend.served_weights
        known = self._known.get(name)
        if known is None or known[0] is not weights:
            known = self._known[name] = weights, _described(frontend.card, weights)
        return known[1]


def _described(card: ModelCard, weights: ServedWeights | None) -> Description:
    files = sorted((path.name, *state) for path, state in weights.files.items()) if weights is not None else []
    try:
        summary = weights.checkpoint.weights_summary() if weights is not None else WeightsSummary()
    except (OSError, FwkError):
        summary = WeightsSummary()  # a file went away: the engines say so
    config = weights.checkpoint.config() if weights is not None else {}
    digest = hashlib.sha256(repr((card.name, files, summary)).encode()).hexdigest()
    return Description(str(config.get("model_type", "")), summary, digest, config, card.max_model_len)


def listed(frontend: Frontend, description: Description) -> dict[str, Any]:
    """A model in /api/tags."""
    more = {"modified_at": when(frontend.card.created), "capabilities": capabilities(frontend)}
    return _named(frontend.card, description) | more


def running(frontend: Frontend, description: Description) -> dict[str, Any]:
    """A model in /api/ps."""
    expires = datetime(9999, 1, 1, tzinfo=UTC).isoformat()
    more = {"expires_at": expires, "size_vram": 0, "context_length": description.context_length}
    return _named(frontend.card, description) | more


def _named(card: ModelCard, description: Description) -> dict[str, Any]:
    return {
        "name": card.name,
        "model": card.name,
        "size": description.summary.num_bytes,
        "digest": description.digest,
        "details": description.details(),
    }


def shown(frontend: Frontend, description: Description) -> dict[str, Any]:
    """The reply of /api/show. Templates are the operator's, and are not told."""
    card, family = frontend.card, description.family or "fwk"
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": card.name,
        "general.parameter_count": description.summary.num_parameters,
        f"{family}.context_length": card.max_model_len,
    }
    for name, ours in _SHAPE.items():
        if type(description.config.get(ours)) is int:
            info[f"{family}.{name}"] = description.config[ours]
    return {
        "modelfile": f"FROM {card.name}",
        "parameters": f"num_ctx {card.max_model_len}",
        "template": "",
        "details": description.details(),
        "model_info": info,
        "capabilities": capabilities(frontend),
        "modified_at": when(card.created),
    }


def when(seconds: float) -> str:
    """A time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _counted(number: int) -> str:
    """As ``134.5M``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number or "")
