"""Reads the source of a ``GrammarRequest``. Everything raises ``InvalidRequest`` for what cannot be read."""

from __future__ import annotations

import json
from typing import Any

from fwk.errors import InvalidRequest
from fwk.types import GrammarRequest

MAX_CHOICES = 20_000
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


def read_json(source: str) -> Any:
    """The JSON that a grammar's source holds."""
    try:
        return json.loads(source)
    except ValueError:
        raise InvalidRequest("the grammar is not the JSON it should be") from None
    except RecursionError:
        raise InvalidRequest("the grammar's JSON is nested too deeply") from None


def schema_of(request: GrammarRequest) -> dict[str, Any]:
    """The schema of a ``json_object`` or ``json_schema`` request."""
    schema = read_json(request.source) if request.kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidRequest("the JSON schema must be an object")
    return schema


def source_of(request: GrammarRequest) -> str:
    """The source of a request that needs one."""
    if not request.source:
        raise InvalidRequest(f"the {request.kind} grammar is empty")
    return request.source


def choices_of(source: str) -> list[str]:
    """The texts of a ``choice`` request."""
    choices = read_json(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest("the choices must be an array of at least one string")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    return choices


def literal(text: str) -> str:
    """A regular expression that matches ``text`` and nothing else."""
    return "".join("\\" + char if char in _SPECIAL else char for char in text)
