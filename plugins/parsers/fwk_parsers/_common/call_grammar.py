"""Grammars of calls in a model's own notation: the pieces of a ``calls`` request (``fwk.types.GrammarRequest``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fwk.types import GrammarRequest
from fwk_parsers._common.typed import resolved, types_of

Part = dict[str, Any]
Call = list[Part]

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly"})
_OBJECT = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")
NAME = "[A-Za-z0-9_.-]+"
"""The names of arguments that can stand between marks."""
_NAME = re.compile(NAME)


class UnwritableSchema(ValueError):
    """A schema that no grammar of ours describes in this notation."""


def text(value: str) -> Part:
    """Exactly this; special tokens are recognised in it."""
    return {"text": value}


def regex(pattern: str) -> Part:
    """A text that the pattern matches as a whole; it has no special tokens."""
    return {"regex": pattern}


def json_value(schema: Mapping[str, Any]) -> Part:
    """JSON that the schema allows."""
    return {"json": dict(schema)}


def either(*calls: Call) -> Part:
    """Any one of these."""
    return {"or": list(calls)}


def repeated(call: Call) -> Part:
    """These, any number of times."""
    return {"repeat": call}


def arguments_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of all arguments of a tool as one object."""
    return {"type": "object", **(tool.get("parameters") or {})}


def request(
    calls: Sequence[Call], is_many: bool, frame: Mapping[str, str], free: Mapping[str, Any] | None = None
) -> GrammarRequest:
    """One call, or with ``is_many`` one or more; ``frame``: ``begin``, ``separator`` and ``end`` where not empty."""
    around = {"begin": "", "separator": "", "end": "", **frame}
    source = {**around, "calls": calls, "is_many": is_many, "free": free}
    return GrammarRequest("calls" if free is None else "free_calls", json.dumps(source))


def literal(words: str) -> str:
    """A pattern that matches ``words`` and nothing else."""
    return "".join("\\" + char if char in _SPECIAL else char for char in words)


def avoiding(marks: Collection[str]) -> str:
    """A pattern of all texts that hold none of the marks, in the size of these and without look-around.

    All begin with ``<`` and have it nowhere else: a mark that breaks off can only begin again at the next ``<``. Raises
    ``ValueError`` for others.
    """
    if not all(mark.rfind("<") == 0 and len(mark) > 1 for mark in marks):
        raise ValueError(f"marks that begin with < and have it nowhere else, not {list(marks)}")
    open_, left = _broken_off([mark[1:] for mark in marks])
    return f"(?:[^<]|(?:<{open_})*<{left})*(?:<{open_})*"


def _broken_off(rests: Sequence[str]) -> tuple[str, str]:
    """Patterns of proper beginnings of the texts: followed by ``<`` or nothing, and by a character that leads away."""
    heads = sorted({rest[0] for rest in rests})
    away = f"[^<{''.join(map(literal, heads))}]"
    further = [_broken_off(tails) if (tails := _tails(rests, head)) else None for head in heads]
    opens = [literal(head) + found[0] for head, found in zip(heads, further, strict=True) if found is not None]
    lefts = [literal(head) + found[1] for head, found in zip(heads, further, strict=True) if found is not None]
    return f"(?:{'|'.join([*opens, ''])})" if opens else "", f"(?:{'|'.join([away, *lefts])})"


def _tails(rests: Sequence[str], head: str) -> list[str]:
    """What follows ``head``; none when a mark ends with it."""
    tails = [rest[1:] for rest in rests if rest[0] == head]
    return tails if all(tails) else []


def properties_of(tool: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Name, schema and whether it is required, of each argument; required ones first.

    Raises ``UnwritableSchema`` for what only one JSON object as a whole could say.
    """
    schema = tool.get("parameters")
    if schema is None:
        return []
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or set(schema) - _OBJECT:
        raise UnwritableSchema("arguments that are not listed")
    if schema.get("type", "object") != "object" or set(required) - set(properties):
        raise UnwritableSchema("arguments that are no object")
    if isinstance(schema.get("additionalProperties"), Mapping):
        raise UnwritableSchema("other arguments")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found: list[tuple[str, dict[str, Any], bool]] = []
    for name, part in properties.items():
        if not isinstance(part, Mapping) or _NAME.fullmatch(name) is None:
            raise UnwritableSchema(f"an argument {name!r}")
        found.append((name, {**part, **shared}, name in required))
    return sorted(found, key=lambda each: not each[2])


def plain_text(schema: Mapping[str, Any], marks: Collection[str]) -> Part | None:
    """The part for an argument that is written without quotes; None for one that is written as JSON."""
    schema = resolved(schema)
    types = types_of(schema)
    if "string" not in types:
        return None
    if set(schema) - ANNOTATIONS - {"type", "enum", "const", "anyOf", "$defs", "definitions"} or (
        "type" in schema and "anyOf" in schema
    ):
        raise UnwritableSchema("a limited string")
    if not {"enum", "const"} & set(schema):
        parts = schema.get("anyOf", ())
        if any(set(part) - ANNOTATIONS - {"type"} for part in parts):
            raise UnwritableSchema("alternatives to a string")
        return regex(avoiding(marks))
    choices = schema.get("enum", [schema.get("const")])
    if types != {"string"} or "anyOf" in schema or not all(isinstance(choice, str) for choice in choices):
        raise UnwritableSchema("constants of several types")
    if any("\n" in choice[:1] + choice[-1:] or any(mark in choice for mark in marks) for choice in choices):
        raise UnwritableSchema("a constant with a mark in it")
    return regex("|".join(map(literal, choices)))


def without_marks(schema: Any, marks: Collection[str]) -> dict[str, Any]:
    """The schema, of whose values none holds a mark of the format. Raises ``UnwritableSchema``."""
    if not isinstance(schema, Mapping):
        raise UnwritableSchema("anything")
    out = dict(schema)
    for name in ("$defs", "definitions", "properties"):
        if name in out:
            out[name] = {key: without_marks(part, marks) for key, part in out[name].items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if name in out:
            out[name] = [without_marks(part, marks) for part in out[name]]
    if "items" in out:
        out["items"] = without_marks(out["items"], marks)
    known = ANNOTATIONS | _NUMBERS | {"type", "enum", "const", "$ref", "$defs", "definitions", "properties"}
    known |= {"required", "additionalProperties", "anyOf", "oneOf", "prefixItems", "items", "minItems", "maxItems"}
    if set(out) - known - {"minLength", "maxLength", "minProperties", "maxProperties", "uniqueItems"}:
        raise UnwritableSchema("a keyword that may allow a mark")
    _check_whole(out, marks)
    if "string" in _listed(out) and not {"enum", "const"} & set(out):
        out["pattern"] = f"^(?:{avoiding(marks)})$"
    return out


def _check_whole(out: Mapping[str, Any], marks: Collection[str]) -> None:
    constants = [*out.get("enum", ()), *([out["const"]] if "const" in out else ()), *out.get("properties", ())]
    if any(mark in json.dumps(constant, ensure_ascii=False) for constant in constants for mark in marks):
        raise UnwritableSchema("a constant with a mark in it")
    if not {"type", "enum", "const", "$ref", "anyOf", "oneOf"} & set(out):
        raise UnwritableSchema("anything")
    types = _listed(out)
    if "object" in types and ("properties" not in out or out.get("additionalProperties", False) is not False):
        raise UnwritableSchema("names that are not listed")
    if "array" in types and not {"items", "prefixItems"} & set(out):
        raise UnwritableSchema("anything")


def _listed(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("type", ())
    return {found} if isinstance(found, str) else set(found)


def each(
    tools: Sequence[Mapping[str, Any]], make: Callable[[Mapping[str, Any]], Call], names: Collection[str] | None = None
) -> list[Call] | None:
    """The calls of all tools, or of those named; None when one of them cannot be written."""
    try:
        return [make(tool) for tool in tools if names is None or tool["name"] in names]
    except UnwritableSchema:
        return None
