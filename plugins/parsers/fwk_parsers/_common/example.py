"""An example of a call, for prompts: small models copy its words, so it has none that are not the tools' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_VALUES: dict[Any, Any] = {"integer": 0, "number": 0, "boolean": True, "array": [], "object": {}, "null": None}
ANY_TEXT = "..."


def example_call(tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The first tool's name and one of its arguments: a text, if it takes any."""
    if not tools:
        return ANY_TEXT, {}
    tool = tools[0]
    properties = (tool.get("parameters") or {}).get("properties")
    kinds = {
        name: schema.get("type", "string") if isinstance(schema, dict) else "string"
        for name, schema in (properties if isinstance(properties, dict) else {}).items()
    }
    kinds = {name: kind[0] if isinstance(kind, list) and kind else kind for name, kind in kinds.items()}
    name = next((name for name, kind in kinds.items() if kind == "string"), next(iter(kinds), None))
    if name is None:
        return tool["name"], {}
    kind = kinds[name]
    return tool["name"], {name: _VALUES.get(kind, ANY_TEXT) if isinstance(kind, str) else ANY_TEXT}
