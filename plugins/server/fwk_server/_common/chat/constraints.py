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

MAX_STRUCTURES = 128
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


def _structural_tag(value: Any, at: str) -> GrammarRequest:
    """SGLang's and vLLM's structures and triggers, or XGrammar's format of the same."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"{at} must hold JSON", at) from None
    want(value, dict, "an object", at)
    if "format" in value:
        form = want(value["format"], dict, "an object", f"{at}.format")
        if form.get("type") != "triggered_tags" or form.get("at_least_one") or form.get("stop_after_first"):
            raise InvalidRequest(f"{at}.format must be plain triggered_tags, or give structures and triggers", at)
        value = {
            "triggers": form.get("triggers"),
            "structures": [_of_format(tag, at) for tag in form.get("tags") or ()],
        }
    triggers = want(value.get("triggers"), list, "an array of strings", f"{at}.triggers")
    structures = want(value.get("structures"), list, "an array of objects", f"{at}.structures")
    if not 0 < len(structures) <= MAX_STRUCTURES or not 0 < len(triggers) <= MAX_STRUCTURES:
        raise InvalidRequest(f"{at} must have 1 to {MAX_STRUCTURES} structures and triggers", at)
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidRequest(f"{at}.triggers must be texts", f"{at}.triggers")
    tags: list[dict[str, Any]] = []
    for i, tag in enumerate(structures):
        here = f"{at}.structures[{i}]"
        want(tag, dict, "an object", here)
        begin, end = (want(tag.get(name), str, "a string", f"{here}.{name}") for name in ("begin", "end"))
        schema = want(tag.get("schema", {}), dict, "a JSON schema", f"{here}.schema")
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise InvalidRequest(f"{here}.begin begins with none of the triggers", f"{here}.begin")
        tags.append({"begin": begin, "schema": schema, "end": end})
    source = {"structures": tags, "triggers": triggers}
    return GrammarRequest("structural_tag", orjson.dumps(source).decode())


def _of_format(tag: Any, at: str) -> dict[str, Any]:
    content = tag.get("content") if isinstance(tag, dict) else None
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise InvalidRequest(f"{at}.format.tags must have contents of type json_schema", at)
    return {"begin": tag.get("begin"), "schema": content.get("json_schema"), "end": tag.get("end")}


def _response_format(value: Any, at: str) -> GrammarRequest:
    kind = value["type"]
    if kind == "structural_tag":
        return _structural_tag(value, at)
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
    "structural_tag": _structural_tag,
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
    "structural_tag": _structural_tag,
    "guided_structural_tag": _structural_tag,
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
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        message = f"response_format.type must be text, json_object, json_schema or structural_tag, not {shown(kind)}"
        raise InvalidRequest(message, "response_format")
    return kind != "text"
