"""Values of arguments that a model writes as plain text, typed by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PYTHON = {"True": True, "False": False, "None": None}


def typed(text: str, schema: Any) -> Any:
    """The value that ``text`` stands for where ``schema`` is expected: what no type explains is a string.

    Without a type in the schema it is JSON if it can be, as templates write everything but strings.
    """
    types = types_of(schema)
    if types == {"string"}:
        return text
    try:
        value = _PYTHON[text] if text in _PYTHON else json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    if "string" in types and (isinstance(value, str) or not _fits(value, types)):
        return text
    return value


def property_of(tool: Mapping[str, Any] | None, name: str) -> Any:
    """The schema of a tool's argument; None when it says nothing of it."""
    parameters = (tool or {}).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def types_of(schema: Any) -> set[str]:
    """The types a schema names; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type")
    if isinstance(found, str):
        return {found}
    if isinstance(found, list):
        return {name for name in found if isinstance(name, str)}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return {"string"}
    parts = [part for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for part in schema[key]]
    known = [types_of(part) for part in parts]
    return set[str]().union(*known) if all(known) else set()


def _fits(value: Any, types: set[str]) -> bool:
    """Whether a value that is no string is of one of the types."""
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return bool(types & {"integer", "number"})
        case float():
            return "number" in types
        case list():
            return "array" in types
        case _:
            return "object" in types


def _refuse(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")
