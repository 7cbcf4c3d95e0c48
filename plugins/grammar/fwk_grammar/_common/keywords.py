"""What a backend makes of a JSON schema's keywords: each binds, binds nothing, or is refused by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fwk.errors import InvalidRequest
from fwk_grammar._common.closing import closed
from fwk_grammar._common.disjoint import Disjoint, resolved

OF_TYPES: dict[str, frozenset[str]] = {
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "array": frozenset(
        {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"}
        | {"contains", "minContains", "maxContains"}
    ),
    "object": frozenset(
        {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"}
        | {"required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"}
    ),
}
"""Keywords that bind values of one type."""

_IN_PLACE = ("$ref", "const", "enum", "anyOf", "oneOf")
BINDING = frozenset(_IN_PLACE).union(
    ("type", "allOf", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef"), *OF_TYPES.values()
)
"""All that say which values are valid, in draft 2020-12 and those before it; others are annotations."""

ALL_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "not",
    "contains",
    "if",
    "then",
    "else",
)
_EMPTY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("uniqueItems", "not"), (False,)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "propertyNames"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
"""Values with which a keyword says nothing."""

_FOR_OTHERS = ("$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "contentSchema")
"""Keywords that say something to others only, which a backend that knows them refuses."""

_TOKENS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|\(\?:|\(\?|.", re.DOTALL)
_NUMBERS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_SHAPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), (dict, "an object")),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "required", "enum"), (list, "an array")),
    **dict.fromkeys(_NUMBERS, (int | float, "a number")),
    "type": (str | list, "a string or an array of strings"),
    **dict.fromkeys(("$ref", "pattern", "format"), (str, "a string")),
}
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_MAX_INTEGER = 2**63 - 1024
"""The largest that a float and 64 bits with a sign both have."""


@dataclass(frozen=True)
class Reading:
    """How a backend reads schemas.

    keywords: those it enforces. merges: also beside ``$ref``, ``anyOf`` and others, and without a type. is_exact: of
    large numbers it reads every digit. tells_keys_apart: however a key is written, it takes no key that is listed for
    one that is not. formats: the values of ``format`` it knows, where it refuses others.
    """

    backend: str
    keywords: frozenset[str]
    merges: bool = False
    is_exact: bool = True
    tells_keys_apart: bool = True
    formats: frozenset[str] | None = None
    remedy: str = ", or serve with --grammar-backend llguidance"

    def refused(self, what: str, why: str = "leave it out") -> InvalidRequest:
        """The error for a part of a schema that it would not enforce."""
        return InvalidRequest(
            f"the grammar backend {self.backend!r} does not enforce {what} of a JSON schema: {why}{self.remedy}"
        )


def readable(schema: dict[str, Any], reading: Reading, is_open: bool = False) -> dict[str, Any]:
    """The schema as a backend enforces it: with what binds nothing left out, and ``oneOf`` as ``anyOf``.

    Objects that list their properties are closed unless ``is_open``. Raises ``InvalidRequest``, with the keyword's
    name, for what it would not enforce.
    """
    try:
        shut = schema if is_open else closed(schema)
        return _Rewriting(reading, schema, shut).root()
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply") from None


class _Rewriting:
    """Goes through a schema as it was given and as it was closed, which have the same places."""

    def __init__(self, reading: Reading, given: dict[str, Any], shut: dict[str, Any]) -> None:
        self._reading = reading
        self._given, self._shut = given, shut
        self._elsewhere: dict[str, Any] = {}  # what references lead to that stands in no keyword
        self._apart = Disjoint(shut, given)
        self._schemas = {id(part) for part in parts(shut)}

    def root(self) -> dict[str, Any]:
        return self._any(self._given, self._shut)

    def _any(self, given: Any, shut: Any) -> Any:
        """A copy, with each schema in it rewritten."""
        if isinstance(shut, list):
            return [self._any(one, two) for one, two in zip(given, shut, strict=True)]
        if not isinstance(shut, dict):
            return shut
        if id(shut) not in self._schemas:
            return {key: self._any(given.get(key), part) for key, part in shut.items()}
        check_shapes(shut)
        bound = [keyword for keyword in shut if not _binds_nothing(shut, keyword)]
        for keyword in bound:
            if keyword in BINDING and keyword not in self._reading.keywords:
                raise self._reading.refused(repr(keyword))
        if "oneOf" in bound:
            self._check_one_of(shut["oneOf"], given["oneOf"])
        part = {key: shut[key] if key in ("const", "enum") else self._any(given.get(key), shut[key]) for key in bound}
        return self._local(part, shut)

    def _local(self, part: dict[str, Any], shut: dict[str, Any]) -> dict[str, Any]:
        """One schema, whose parts are rewritten."""
        reading = self._reading
        if reading.formats is not None and part.get("format") not in reading.formats:
            part.pop("format", None)
        for keyword in part.keys() & {"anyOf", "oneOf"}:
            part[keyword] = [one for one in part[keyword] if one is not False]
            if not part[keyword]:
                raise InvalidRequest(f"no value fits the JSON schema: a {keyword!r} has no part that one may fit")
        if not reading.merges:
            part = self._alone(part, shut)
        _check_counts(part, reading)
        _check_numbers(part, reading)
        if "oneOf" not in part:
            return part
        choices = {"anyOf": part.pop("oneOf")}
        if "anyOf" not in part:
            return part | choices
        return {**part, "allOf": [*part.get("allOf", []), choices, {"anyOf": part.pop("anyOf")}]}

    def _check_one_of(self, shut: list[Any], given: list[Any]) -> None:
        """Refuse parts that may both hold: what one lets through as it is closed, no other may as it was given."""
        for i, one in enumerate(shut):
            for j, two in enumerate(given):
                if i != j and not self._apart.are(one, two):
                    raise InvalidRequest(
                        f"parts {min(i, j) + 1} and {max(i, j) + 1} of a 'oneOf' of the JSON schema may both hold for "
                        "one value, which no grammar backend rules out: use anyOf, or tell them apart by a type, a "
                        "constant or a required property"
                    )

    def _alone(self, part: dict[str, Any], shut: dict[str, Any]) -> dict[str, Any]:
        """For a backend that reads one keyword of a place and skips others: what it reads, with nothing skipped."""
        reading = self._reading
        binding = [keyword for keyword in part if keyword in BINDING]
        if "$id" in part and shut is not self._shut:
            raise reading.refused("'$id' inside", "refer to places in the schema (#/...)")
        for keyword in _IN_PLACE:
            beside = [other for other in binding if other != keyword]
            if keyword not in part:
                continue
            if keyword in ("const", "enum") and beside == ["type"]:
                kept = [value for value in _constants(part) if _is_of(value, part["type"])]
                return {key: value for key, value in part.items() if key not in binding} | {"enum": kept}
            if beside:
                raise reading.refused(f"{beside[0]!r} beside {keyword!r}", "write one of them into the other")
            if keyword == "$ref" and resolved(self._shut, part["$ref"]) is None:
                raise reading.refused(f"a '$ref' to {part['$ref']!r}", "refer to a place in the schema (#/...)")
        if "pattern" in part:
            _check_pattern(part, reading)
        typed = [keyword for keyword in binding if keyword != "type" and keyword not in _IN_PLACE]
        if typed and "type" not in part:
            is_object = all(keyword in OF_TYPES["object"] for keyword in typed) and "properties" in part
            part = {**part, "type": "object" if is_object else ALL_TYPES}
        return _with_required(part, reading)


def tokens_of(pattern: str) -> list[str]:
    """Of a regular expression: its classes, escapes, groups' beginnings, and characters."""
    return _TOKENS.findall(pattern)


def _check_pattern(part: dict[str, Any], reading: Reading) -> None:
    """Refuse a pattern that would be read otherwise: backends take one for a whole string, and strip its anchors."""
    length = next((keyword for keyword in ("minLength", "maxLength") if keyword in part), None)
    if length is not None:
        raise reading.refused(f"'pattern' and {length!r} of one string", "write the length into the pattern")
    depth, tokens = 0, tokens_of(part["pattern"])
    is_anchored = "^" in tokens or "$" in tokens
    for i, token in enumerate(tokens):
        depth += {"(": 1, "(?:": 1, ")": -1}.get(token, 0)
        is_inside = (token == "^" and i > 0) or (token == "$" and i < len(tokens) - 1)
        if is_inside or (token == "|" and not depth and is_anchored):
            raise reading.refused(f"the 'pattern' {part['pattern']!r}", "put it between ^(?: and )$")


def _with_required(part: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """With each required key listed."""
    if "properties" in part:  # what may not be there is not listed
        part["properties"] = {name: schema for name, schema in part["properties"].items() if schema is not False}
    named, rest = part.get("properties", {}), part.get("additionalProperties", True)
    missing = [name for name in part.get("required", ()) if name not in named]
    if missing and rest is False:
        raise InvalidRequest(f"no object fits the JSON schema: {missing[0]!r} is 'required' and not allowed")
    if (named or missing) and rest is not False and not reading.tells_keys_apart:
        keyword = "required" if missing else "properties"
        raise reading.refused(f"{keyword!r} where other keys are allowed", "set additionalProperties to false")
    return {**part, "properties": {**named, **dict.fromkeys(missing, rest)}} if missing else part


def parts(root: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas inside it, and those its references lead to."""
    todo, seen = [root], set[int]()
    while todo:
        schema = todo.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        for keyword in _MAPS:
            inner = schema.get(keyword)
            todo += inner.values() if isinstance(inner, dict) else ()
        for keyword in _LISTS:
            inner = schema.get(keyword)
            todo += inner if isinstance(inner, list) else ()
        todo += [schema.get(keyword) for keyword in _SCHEMAS]
        if isinstance(schema.get("$ref"), str):
            todo.append(resolved(root, schema["$ref"]))


def check_shapes(part: dict[str, Any]) -> None:
    """Raise ``InvalidRequest`` for a keyword whose value is of no kind that it may have."""
    for keyword, (kind, name) in _SHAPES.items():
        value = part.get(keyword)
        if keyword in part and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise InvalidRequest(f"{keyword!r} of the JSON schema must be {name}")
    types = part.get("type", ())
    for one in [types] if isinstance(types, str) else types:
        if one not in (names := (*ALL_TYPES, "integer")):
            raise InvalidRequest(f"'type' of the JSON schema must be one of {', '.join(names)}, not {one!r:.80}")


def has_named_and_free_keys(schema: Any) -> bool:
    """Whether an object may have both keys that are told by name or pattern, and others."""
    return any(
        part.get("additionalProperties") is not False and part.keys() & {"properties", "patternProperties", "required"}
        for part in parts(schema)
    )


def _binds_nothing(part: dict[str, Any], keyword: str) -> bool:
    """Whether a keyword says nothing of any value, where it stands and with the value it has."""
    value = part[keyword]
    if keyword in _EMPTY:
        return any(value is empty or (empty == {} and value == {}) for empty in _EMPTY[keyword])
    if keyword in ("then", "else"):
        return "if" not in part
    if keyword == "if":
        return "then" not in part and "else" not in part
    if keyword in ("contains", "minContains", "maxContains"):
        return "contains" not in part or (part.get("minContains") == 0 and "maxContains" not in part)
    if keyword == "additionalItems":
        return not isinstance(part.get("items"), list)
    if keyword == "$schema":
        return "openapis.org" in str(value)  # its dialect is draft 2020-12 with annotations
    return keyword in _FOR_OTHERS


def _check_counts(part: dict[str, Any], reading: Reading) -> None:
    """Refuse numbers of keys that an object would not have: a key that comes twice is one."""
    names = part.get("properties", {})
    num_required = len(set(part.get("required", ())))
    fewest, most = part.get("minProperties", 0), part.get("maxProperties", math.inf)
    if num_required > most:
        raise InvalidRequest(
            f"no object fits the JSON schema: more are 'required' than 'maxProperties' ({most}) allows"
        )
    has_free_keys = part.get("additionalProperties", True) is not False or "patternProperties" in part
    if has_free_keys and fewest - num_required > 1:
        raise reading.refused(
            f"a 'minProperties' of {fewest}", "list as 'required' all but one of the keys that must be there"
        )
    keyword = "minProperties" if fewest > num_required else "maxProperties"
    is_simple = not has_free_keys and fewest - num_required <= 1 and most - num_required in (1, math.inf)
    if reading.merges and set(names) - set(part.get("required", ())) and keyword in part and not is_simple:
        raise reading.refused(f"{keyword!r} of an object with optional 'properties'")


def _check_numbers(part: dict[str, Any], reading: Reading) -> None:
    """Move bounds inward, to numbers that the backend reads exactly; refuse constants that it does not."""
    if reading.is_exact:
        return
    for keyword, sign in _BOUNDS.items():
        bound = part.get(keyword)
        if isinstance(bound, int) and not isinstance(bound, bool):
            part[keyword] = _inward(bound, sign)
    for keyword in ("const", "enum"):
        if keyword in part and (inexact := next(_inexact(part[keyword]), None)) is not None:
            raise reading.refused(f"the number {inexact} in {keyword!r}", "write it as a string")


def _inward(bound: int, sign: int) -> int:
    """The nearest number on the side of the values that 64 bits have exactly, as a float and as an integer."""
    if abs(bound) <= 2**53:
        return bound
    try:
        near = float(bound)
    except OverflowError:
        near = math.copysign(math.inf, bound)
    if math.isfinite(near) and (int(near) - bound) * sign < 0:
        near = math.nextafter(near, math.inf * sign)
    if not math.isfinite(near):
        return _MAX_INTEGER if bound > 0 else -_MAX_INTEGER
    return max(-_MAX_INTEGER, min(_MAX_INTEGER, int(near)))


def _inexact(value: Any) -> Iterator[int]:
    if isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _inexact(inner)
    elif isinstance(value, int) and abs(value) > 2**53 and (abs(value) > _MAX_INTEGER or int(float(value)) != value):
        yield value


def _constants(part: dict[str, Any]) -> list[Any]:
    return [part["const"]] if "const" in part else list(part["enum"])


def _is_of(value: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    match value:
        case None:
            return "null" in names
        case bool():
            return "boolean" in names
        case int():
            return "integer" in names or "number" in names
        case float():
            return "number" in names or ("integer" in names and value.is_integer())
        case str():
            return "string" in names
        case list():
            return "array" in names
    return "object" in names
