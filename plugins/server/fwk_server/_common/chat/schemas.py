"""Whether a tool's parameters are a JSON schema: the shapes of the keywords that templates and grammars read."""

from __future__ import annotations

from typing import Any

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown, want

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_ONE = ("items", "additionalProperties", "not", "contains", "if", "then", "else", "propertyNames")
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")


def check_schema(value: Any, at: str) -> None:
    """Raise ``InvalidRequest`` naming the place that cannot be part of a schema. The body's depth bounds this one's."""
    if isinstance(value, bool):
        return
    want(value, dict, "a JSON schema", at)
    _check_type(value.get("type"), f"{at}.type")
    if isinstance(value.get("items"), list):  # as drafts before 2020 have it
        value = value | {"prefixItems": value["items"], "items": None}
    parts = [(value[name], f"{at}.{name}") for name in _ONE if value.get(name) is not None]
    for name in _MANY:
        listed = want(value.get(name) or [], list, "an array of JSON schemas", f"{at}.{name}")
        parts += [(part, f"{at}.{name}[{i}]") for i, part in enumerate(listed)]
    for name in _NAMED:
        named = want(value.get(name) or {}, dict, "an object of JSON schemas", f"{at}.{name}")
        parts += [(part, f"{at}.{name}.{key[:64]}") for key, part in named.items()]
    for part, where in parts:
        check_schema(part, where)
    for key in want(value.get("required") or [], list, "an array of strings", f"{at}.required"):
        want(key, str, "an array of strings", f"{at}.required")
    want(value.get("enum") or [], list, "an array", f"{at}.enum")


def _check_type(kinds: Any, at: str) -> None:
    for kind in kinds if isinstance(kinds, list) else [kinds] if kinds is not None else []:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise InvalidRequest(f"{at} must be one of {', '.join(sorted(_TYPES))}, not {shown(kind)}", at)
