"""What a request says its output must look like, under all the names clients have for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from fwk.errors import InvalidRequest
from fwk.types import GrammarRequest
from fwk_server._common.body import shown, want

Reader = Callable[[Any, str], GrammarRequest]
Constraint = tuple[GrammarRequest, str]
"""A grammar, and the field that asked for it."""

NO_GRAMMAR = "this server has no grammar backend, so it cannot constrain its output"


def _schema(value: Any, at: str) -> GrammarRequest:
    if isinstance(value, str):
        return GrammarRequest("json_schema", value)
    return GrammarRequest("json_schema", orjson.dumps(want(value, dict, "a JSON schema", at)).decode())


def _text(kind: Any) -> Reader:
    return lambda value, at: GrammarRequest(kind, want(value, str, "a string", at))


def _choice(value: Any, at: str) -> GrammarRequest:
    want(value, list, "an array of strings", at)
    choices = [want(text, str, "a string", f"{at}[{i}]") for i, text in enumerate(value)]
    return GrammarRequest("choice", orjson.dumps(choices).decode())


def _json_object(value: Any, at: str) -> GrammarRequest:
    want(value, bool, "true or false", at)
    return GrammarRequest("json_object")


def _response_format(value: Any, at: str) -> GrammarRequest:
    kind = value["type"]
    if kind == "json_object":
        return GrammarRequest("json_object")
    inner = want(value.get("json_schema"), dict, "an object", f"{at}.json_schema")
    if inner.get("schema") is None:
        raise InvalidRequest(f"{at}.json_schema.schema is missing", f"{at}.json_schema.schema")
    return _schema(want(inner["schema"], dict, "an object", f"{at}.json_schema.schema"), f"{at}.json_schema.schema")


_STRUCTURED: dict[str, Reader] = {
    "json": _schema,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("ebnf"),
    "json_object": _json_object,
}
_FIELDS: dict[str, Reader] = {
    "response_format": _response_format,
    "guided_json": _schema,
    "guided_regex": _text("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text("ebnf"),
    "json_schema": _schema,
    "regex": _text("regex"),
    "ebnf": _text("ebnf"),
}

WORDS = [name.encode() for name in ("structured_outputs", "tool", "function", *_FIELDS)]
"""What the body of a request holds that may need a grammar compiled."""


def read_constraint(raw: Mapping[str, Any], kinds: frozenset[str]) -> Constraint | None:
    """The one constraint of a request. ``kinds`` are those the server can keep."""
    found = [(name, raw[name], reader) for name, reader in _FIELDS.items() if _is_given(name, raw.get(name))]
    structured = raw.get("structured_outputs")
    if structured not in (None, {}, []):
        want(structured, dict, "an object", "structured_outputs")
        for name, value in structured.items():
            if value is None or value is False:
                continue
            at = f"structured_outputs.{name}"
            if name not in _STRUCTURED:
                raise InvalidRequest(f"{at} is not supported, only {', '.join(_STRUCTURED)}", at)
            found.append((at, value, _STRUCTURED[name]))
    if not found:
        return None
    if not kinds:
        name = found[0][0].partition(".")[0]
        raise InvalidRequest(f"{name}: {NO_GRAMMAR}", name)
    if len(found) > 1:
        raise InvalidRequest(f"{found[0][0]} and {found[1][0]} both constrain the output: give one", found[1][0])
    at, value, reader = found[0]
    return reader(value, at), at


def _is_given(name: str, value: Any) -> bool:
    """Whether a field asks for something; null, "" and {} do not, nor does a response format of text."""
    if name != "response_format" or value is None:
        return value not in (None, "", {}, [])
    want(value, dict, "an object", name)
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        message = f"response_format.type must be text, json_object or json_schema, not {shown(kind)}"
        raise InvalidRequest(message, "response_format")
    return kind != "text"
