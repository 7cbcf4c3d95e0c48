"""Which JSON schema keywords a backend enforces: a schema that uses another one is refused, not read without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from fwk.errors import InvalidRequest

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "format",
        "contentEncoding",
        "contentMediaType",
        "discriminator",
    ]
)
"""Keywords that say nothing about which values are valid; ``format`` is one by default."""

_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "propertyNames", "not", "contains", "unevaluatedProperties")


def check_keywords(schema: dict[str, Any], enforced: frozenset[str], backend: str) -> None:
    """Raise ``InvalidRequest`` for the first keyword that is neither in ``enforced`` nor an annotation.

    ``oneOf`` is read as ``anyOf`` by backends that enforce it, so its parts must exclude each other. Of a pattern and
    lengths they enforce one: XGrammar 0.2 the pattern, outlines-core the lengths.
    """
    for part in _parts(schema):
        for keyword in part:
            if keyword not in enforced and keyword not in ANNOTATIONS:
                raise InvalidRequest(
                    f"the grammar backend {backend!r} does not enforce {keyword!r} of a JSON schema: leave it out, or "
                    "serve with --grammar-backend llguidance"
                )
        lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in part]
        if "pattern" in part and lengths:
            raise InvalidRequest(
                f"the grammar backend {backend!r} does not enforce 'pattern' and {lengths[0]!r} of one string: write "
                "the length into the pattern, or serve with --grammar-backend llguidance"
            )
        choices = part.get("oneOf")
        if isinstance(choices, list) and not _exclude_each_other(choices):
            raise InvalidRequest(
                f"the grammar backend {backend!r} reads 'oneOf' only where types or constants tell its parts apart: "
                "use anyOf"
            )


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas inside it."""
    if not isinstance(schema, dict):
        return
    schema = cast(dict[str, Any], schema)
    yield schema
    for keyword in _MAPS:
        inner = schema.get(keyword)
        for value in inner.values() if isinstance(inner, dict) else ():
            yield from _parts(value)
    for keyword in _LISTS:
        inner = schema.get(keyword)
        for value in inner if isinstance(inner, list) else ():
            yield from _parts(value)
    for keyword in _SCHEMAS:
        yield from _parts(schema.get(keyword))


def _exclude_each_other(choices: list[Any]) -> bool:
    return all(_differ(one, two) for i, one in enumerate(choices) for two in choices[:i])


def _differ(one: Any, two: Any) -> bool:
    """Whether no value fits both: other types, other constants, or such a difference in a required property."""
    if not isinstance(one, dict) or not isinstance(two, dict):
        return False
    if {"integer", "number"} != {one.get("type"), two.get("type")} and _apart([one.get("type")], [two.get("type")]):
        return True
    if _apart(_constants(one), _constants(two)):
        return True
    shared = set(one.get("required", ())) & set(two.get("required", ()))
    first, second = one.get("properties", {}), two.get("properties", {})
    return any(_differ(first.get(name), second.get(name)) for name in shared)


def _constants(schema: dict[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", [None]))


def _apart(one: list[Any], two: list[Any]) -> bool:
    """Whether both are known and have nothing in common."""
    return None not in one and None not in two and not any(a == b for a in one for b in two)
