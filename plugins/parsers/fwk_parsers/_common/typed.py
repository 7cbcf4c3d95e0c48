"""Values of arguments that a model writes as plain text, typed by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote

from fwk_parsers._common.python_calls import read_python_value

MAX_REFERENCES = 16
"""Schemas within schemas that are followed; one that refers to itself says nothing."""

MAX_EXACT = 2**53
"""Integers up to here are told apart as floats."""

_PYTHON = {"True": True, "False": False, "None": None}
_ALL = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_SAYS_NOTHING = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly"})
_DEFINITIONS = ("$defs", "definitions")


def typed(text: str, schema: Any, root: Any = None) -> Any:
    """The value that ``text`` stands for where ``schema`` is expected: what no type explains is a string.

    Without a type in the schema it is JSON if it can be, as templates write everything but strings. References are
    looked up in ``root``, the schema of all arguments.
    """
    root = schema if root is None else root
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    try:
        value = coerced(_literal(text, types), schema, root)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    if "string" not in types:
        return value
    choices = _choices(schema, root)
    if choices is not None:
        return value if text not in choices and any(_is_same(value, choice) for choice in choices) else text
    return text if isinstance(value, str) or not _fits(value, types) else value


def is_absent(text: str, schema: Any, root: Any = None) -> bool:
    """Whether nothing was written where something had to be: such an argument is left out."""
    types = types_of(schema, root)
    return not text.strip() and bool(types) and not types & {"string", "null"}


def coerced(value: Any, schema: Any, root: Any) -> Any:
    """``value`` with integers for ``230.0`` where the schema asks for integers."""
    if isinstance(value, float):
        types = types_of(schema, root)
        is_whole = value.is_integer() and abs(value) <= MAX_EXACT
        return int(value) if is_whole and "integer" in types and "number" not in types else value
    if not isinstance(value, (list, dict)):
        return value
    for part in _parts(schema, root, 0):
        if isinstance(value, list):
            first = part.get("prefixItems")
            first = first if isinstance(first, list) else []
            schemas = [*first, *[part.get("items")] * (len(value) - len(first))]
            value = [coerced(item, each, root) for item, each in zip(value, schemas, strict=False)]
        else:
            named = part.get("properties")
            named = named if isinstance(named, Mapping) else {}
            others = part.get("additionalProperties")
            value = {key: coerced(item, named.get(key, others), root) for key, item in value.items()}
    return value


def property_of(tool: Mapping[str, Any] | None, name: str) -> Any:
    """The schema of a tool's argument; None when it says nothing of it."""
    root = (tool or {}).get("parameters")
    for part in _parts(root, root, 0):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
    return None


def types_of(schema: Any, root: Any = None) -> set[str]:
    """The types a schema allows; empty when it does not say."""
    found = _types(schema, schema if root is None else root, 0)
    if found == _ALL:
        return set()
    return set(found - {"integer"} if "number" in found else found)


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema that is nothing but a reference, alone or in ``allOf``, refers to, with the definitions."""
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    for _ in range(MAX_REFERENCES):
        rest = {key: part for key, part in schema.items() if key not in (*_DEFINITIONS, *_SAYS_NOTHING)}
        parts = rest.get("allOf")
        if set(rest) == {"$ref"}:
            target = _target(rest["$ref"], shared)
        elif set(rest) == {"allOf"} and isinstance(parts, list) and len(parts) == 1:
            target = parts[0]
        else:
            break
        if not isinstance(target, Mapping):
            break
        schema = {**target, **shared}
    return schema


def _literal(text: str, types: set[str]) -> Any:
    """A value as JSON or Python writes it. Raises ``ValueError``."""
    if text in _PYTHON:
        return _PYTHON[text]
    word = text.strip().lower()
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if "null" in types and word in ("null", "none"):
        return None
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        if types & {"array", "object"}:
            return read_python_value(text)
        if types & {"integer", "number"} and "string" not in types:
            return int(text)
        raise


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return _ALL
    found = _ALL
    if isinstance(schema.get("$ref"), str):
        found &= _types(_target(schema["$ref"], root), root, depth + 1)
    listed = schema.get("type")
    if isinstance(listed, (str, list)):
        names = {name for name in ([listed] if isinstance(listed, str) else listed) if isinstance(name, str)}
        names |= {"integer"} if "number" in names else set()
        found &= names | ({"null"} if schema.get("nullable") is True else set())
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list):
        found &= {_type_of(choice) for choice in choices}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset[str]().union(*(_types(part, root, depth + 1) for part in schema[key]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= _types(part, root, depth + 1)
    return found


def _parts(schema: Any, root: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """A schema and all those that speak of the same value."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return
    yield cast("Mapping[str, Any]", schema)
    if isinstance(schema.get("$ref"), str):
        yield from _parts(_target(schema["$ref"], root), root, depth + 1)
    for key in ("allOf", "anyOf", "oneOf"):
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _parts(part, root, depth + 1)


def _choices(schema: Any, root: Any) -> list[Any] | None:
    """The values a schema lists; None where it lists none."""
    for part in _parts(schema, root, 0):
        choices = part.get("enum", [part["const"]] if "const" in part else None)
        if isinstance(choices, list):
            return choices
        if {"anyOf", "oneOf"} & set(part):
            return None
    return None


def _target(reference: str, root: Any) -> Any:
    """What a reference within the schema points to; None where it points elsewhere."""
    path, found = unquote(reference), root
    if not isinstance(root, Mapping):
        return None
    if path != "#" and not path.startswith("#/"):
        parts = [part for key in _DEFINITIONS if isinstance(root.get(key), Mapping) for part in root[key].values()]
        return next((part for part in parts if isinstance(part, Mapping) and path == f"#{part.get('$anchor')}"), None)
    for step in path.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, Mapping) and key in found:
            found = found[key]
        else:
            return None
    return found


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case list():
            return "array"
        case _:
            return "object"


def _fits(value: Any, types: set[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _is_same(left: Any, right: Any) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _refuse(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")
