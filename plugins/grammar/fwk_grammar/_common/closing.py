"""Objects of a JSON schema that list their properties, and say nothing of others, get no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_COMPOSED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas"})
"""Alongside these an object may have properties that only another part of the schema lists."""


def closed(schema: Any) -> Any:
    """A copy with ``additionalProperties: false`` where it changes only what the schema leaves open.

    Nothing inside ``allOf`` is closed, nor is any definition when the schema has an ``allOf`` with a reference:
    each part would then forbid what the others require.
    """
    return _closed(schema, _has_merged_references(schema))


def _closed(schema: Any, keeps_definitions: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    out = dict(schema)
    for name in _SCHEMAS_BY_NAME:
        is_definition = name in ("$defs", "definitions")
        if isinstance(out.get(name), Mapping) and not (is_definition and keeps_definitions):
            out[name] = {key: _closed(part, keeps_definitions) for key, part in out[name].items()}
    for name in _LISTS:
        # Alongside properties of its own, an object's alternatives are about the same object.
        if isinstance(out.get(name), list) and "properties" not in out:
            out[name] = [_closed(part, keeps_definitions) for part in out[name]]
    for name in _SCHEMAS:
        if name in out:
            out[name] = _closed(out[name], keeps_definitions)
    if "properties" in out and not _COMPOSED & out.keys() and "unevaluatedProperties" not in out:
        out.setdefault("additionalProperties", False)
    return out


def _has_merged_references(schema: Any) -> bool:
    """Whether a reference stands where its definition is merged with another schema."""
    if isinstance(schema, list):
        return any(map(_has_merged_references, schema))
    if not isinstance(schema, Mapping):
        return False
    if "$ref" in schema and "properties" in schema:
        return True
    return any((key == "allOf" and "$ref" in str(part)) or _has_merged_references(part) for key, part in schema.items())
