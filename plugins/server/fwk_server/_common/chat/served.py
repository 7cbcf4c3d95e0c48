"""The served model as the API lists it, and the check of a request's ``model``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, ModelCard
from fwk_server._common.body import shown, want

_SENSES = {"image": "vision", "audio": "audio"}


class UnknownModel(HTTPException):
    """A request named a model that is not served."""

    param = "model"
    code = "model_not_found"

    def __init__(self, name: str, card: ModelCard) -> None:
        names = " and ".join(repr(one) for one in (card.name, *card.peer_names))
        super().__init__(
            404, f"the model {shown(name)} is not served here; {names} {'are' if card.peer_names else 'is'}"
        )


def check_model(name: str | None, card: ModelCard) -> None:
    """Clients may leave ``model`` out; a name must be one of the served model."""
    if name and not card.is_called(name):
        raise UnknownModel(name, card)


def check_named(raw: Mapping[str, Any], card: ModelCard) -> None:
    """As ``check_model``, for a body whose API has no ``model``, by which a server of several models goes as well."""
    check_model(want(raw.get("model") or "", str, "a string", "model"), card)


def adapter_of(model: str | None, frontend: Frontend, lora_path: str | None = None) -> str:
    """The adapter a request is for; empty for the model alone. Raises ``UnknownModel`` or ``InvalidRequest``."""
    named = named_by_model(model, frontend)
    if not lora_path:
        return named
    if named not in ("", lora_path):
        raise InvalidRequest("model and lora_path name different LoRA adapters: leave one out", "lora_path")
    if lora_path not in frontend.adapters:
        hint = "" if frontend.adapters else ": this server has none, for which it needs --enable-lora"
        raise InvalidRequest(f"no LoRA adapter {shown(lora_path)} is loaded{hint}", "lora_path")
    return lora_path


def named_by_model(model: str | None, frontend: Frontend) -> str:
    """``model`` names the served model, an adapter, or both with a colon between; adapters' names have none."""
    card = frontend.card
    if not model or card.is_called(model):
        return ""
    before, _, after = model.rpartition(":")
    adapter = after if before and card.is_called(before) else model
    if adapter not in frontend.adapters:
        raise UnknownModel(model, frontend.card)
    return adapter


def capabilities(frontend: Frontend) -> list[str]:
    """What can be asked of the model, in Ollama's words."""
    senses = [word for kind, word in _SENSES.items() if frontend.card.media.get(kind)]
    if frontend.card.task != "generate":
        return ["embedding" if frontend.card.task == "embed" else frontend.card.task, *senses]
    fills = ["insert"] if _fills_in(frontend) else []
    thinks = ["thinking"] if frontend.reasoning_parser() is not None else []
    return ["completion", "tools", *fills, *thinks, *senses]


def _fills_in(frontend: Frontend) -> bool:
    """Whether the model writes text in the middle."""
    try:
        frontend.text.infill("", "")
    except InvalidRequest:
        return False
    return True


def model_bodies(frontend: Frontend) -> list[dict[str, Any]]:
    """The served model under each of its names."""
    return [model_body(frontend, name) for name in (frontend.card.name, *frontend.card.other_names)]


def model_body(frontend: Frontend, name: str | None = None) -> dict[str, Any]:
    """A model as the API lists it, with vLLM's additions and what it is for: ``generate`` or ``embed``."""
    card = frontend.card
    return {
        "id": name or card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "fwk",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
        "task": card.task,
        "capabilities": capabilities(frontend),
    }


def anthropic_body(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model, listed as Anthropic's API does."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }
