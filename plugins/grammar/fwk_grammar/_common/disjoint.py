"""Whether two JSON schemas have no value in common, as far as that can be seen from them."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from fwk.errors import InvalidRequest

MAX_DEPTH = 12
MAX_COMPARISONS = 200_000
"""About a second."""

_TYPES = {"null", "boolean", "number", "string", "array", "object"}
_RANGES = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))
_OF_RANGES = ("number", "string", "array")


def resolved(root: Any, reference: str) -> Any:
    """What a reference within a document leads to; None where nothing is seen there."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = root
    for piece in unquote(reference[2:]).split("/"):
        name = piece.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


class Disjoint:
    """Compares parts of one document with parts of another."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second
        self._num_comparisons = 0

    def are(self, one: Any, two: Any, depth: int = 0) -> bool:
        """Whether no value fits both; False where that is not seen."""
        self._num_comparisons += 1
        if self._num_comparisons > MAX_COMPARISONS:
            raise InvalidRequest("the JSON schema has too large a 'oneOf' to tell its parts apart: use anyOf")
        if one is False or two is False:
            return True
        if not isinstance(one, dict) or not isinstance(two, dict) or depth > MAX_DEPTH:
            return False
        if _differ(one, two) or self._differ_in_a_key(one, two, depth):
            return True
        return (
            any(self.are(part, two, depth + 1) for part in _conjuncts(one, self._first))
            or any(self.are(one, part, depth + 1) for part in _conjuncts(two, self._second))
            or any(all(self.are(part, two, depth + 1) for part in one[keyword]) for keyword in _alternatives(one))
            or any(all(self.are(one, part, depth + 1) for part in two[keyword]) for keyword in _alternatives(two))
        )

    def _differ_in_a_key(self, one: dict[str, Any], two: dict[str, Any], depth: int) -> bool:
        if one.get("type") != "object" or two.get("type") != "object":
            return False
        names = [*_names(one), *_names(two)]
        return any(self.are(_of_key(one, name), _of_key(two, name), depth + 1) for name in names)


def _names(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _of_key(schema: dict[str, Any], name: str) -> Any:
    """What a key's value must fit."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _conjuncts(schema: dict[str, Any], root: Any) -> list[Any]:
    """Other schemas that each of its values fits."""
    found = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
    return [*found, resolved(root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else found


def _alternatives(schema: dict[str, Any]) -> list[str]:
    return [keyword for keyword in ("anyOf", "oneOf") if isinstance(schema.get(keyword), list)]


def _differ(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """By types, constants, or ranges."""
    types = _types(one), _types(two)
    shared = types[0] & types[1]
    if not shared:
        return True
    constants = _constants(one), _constants(two)
    if constants[0] is not None and constants[1] is not None:
        return not any(_equal(a, b) for a in constants[0] for b in constants[1])
    if len(shared) > 1:
        return False
    for (least, most), kind in zip(_RANGES, _OF_RANGES, strict=True):
        if kind in shared:
            return _below(one.get(most), two.get(least)) or _below(two.get(most), one.get(least))
    return False


def _below(most: Any, least: Any) -> bool:
    return isinstance(most, int | float) and isinstance(least, int | float) and most < least


def _types(schema: dict[str, Any]) -> set[str]:
    """Of the values that may fit."""
    constants = _constants(schema)
    given = schema.get("type", list(_TYPES))
    names = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set(_TYPES)
    names = {"number" if name == "integer" else name for name in names}
    return names if constants is None else names & {_type(value) for value in constants}


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def _equal(one: Any, two: Any) -> bool:
    """As JSON: 1 and 1.0 are, 1 and true are not. Arrays and objects that hold such are taken for equal."""
    return _type(one) == _type(two) and one == two
