"""The served model as the API lists it, and the check of a request's ``model``."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from fwk.interfaces.dialect import ModelCard
from fwk_server._common.body import shown


class UnknownModel(HTTPException):
    """A request named a model that is not served."""

    param = "model"
    code = "model_not_found"

    def __init__(self, name: str, card: ModelCard) -> None:
        super().__init__(404, f"the model {shown(name)} is not served here; {card.name!r} is")


def check_model(name: str | None, card: ModelCard) -> None:
    """Clients may leave ``model`` out; a name must be that of the served model."""
    if name and name != card.name:
        raise UnknownModel(name, card)


def model_body(card: ModelCard) -> dict[str, Any]:
    """A model as the API lists it, with vLLM's additions and what it is for: ``generate`` or ``embed``."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "fwk",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
        "task": card.task,
    }
