"""From a request's grammar to llguidance's own notation."""

from __future__ import annotations

import json
from typing import Any

from fwk.errors import InvalidRequest
from fwk.types import GrammarRequest
from fwk_grammar.llguidance import LLGuidanceOptions
from fwk_grammar.llguidance.closing import closed
from llguidance import LLMatcher, grammar_from

MAX_CHOICES = 20_000
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


def notation(request: GrammarRequest, options: LLGuidanceOptions) -> str:
    """What ``LLMatcher`` compiles. Raises ``InvalidRequest`` for what cannot even be read."""
    source = request.source
    if request.kind in ("json_object", "json_schema"):
        return _json(source if request.kind == "json_schema" else '{"type": "object"}', options)
    if not source:
        raise InvalidRequest(f"the {request.kind} grammar is empty")
    if request.kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if request.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_literal, _choices(source))))
    if request.kind == "tagged":
        return LLMatcher.grammar_from_lark(_tagged(_read(source), options))
    try:
        return grammar_from("ebnf" if "::=" in source else "lark", source)
    except ValueError as error:
        raise InvalidRequest(f"the grammar cannot be read: {error}") from None


def _json(source: str, options: LLGuidanceOptions) -> str:
    schema = _read(source)
    if not isinstance(schema, dict):
        raise InvalidRequest("the JSON schema must be an object")
    if not options.constrained_json_open_objects:
        schema = closed(schema)
    return LLMatcher.grammar_from_json_schema(schema, overrides=_settings(options))


def _settings(options: LLGuidanceOptions) -> Any:
    """Stand above what a schema says of itself (``x-guidance``); ``lenient`` would skip keywords it cannot enforce."""
    if options.constrained_json_disable_any_whitespace:
        return {"lenient": False, "whitespace_flexible": False}
    return {"lenient": False, "whitespace_pattern": options.constrained_json_whitespace_pattern}


def _read(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError:
        raise InvalidRequest("the grammar is not the JSON it should be") from None
    except RecursionError:
        raise InvalidRequest("the grammar's JSON is nested too deeply") from None


def _choices(source: str) -> list[str]:
    choices = _read(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest("the choices must be an array of at least one string")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    return choices


def _literal(text: str) -> str:
    """A regular expression for nothing but ``text``."""
    return "".join("\\" + char if char in _SPECIAL else char for char in text)


def _tagged(source: dict[str, Any], options: LLGuidanceOptions) -> str:
    """Pieces of JSON between fixed texts, in Lark."""
    rules: list[str] = []
    for i, tag in enumerate(source["tags"]):
        schema = tag["schema"] if options.constrained_json_open_objects else closed(tag["schema"])
        schema = {**schema, "x-guidance": _settings(options)}
        rules.append(f"tag{i}: {_quoted(tag['begin'])} json{i} {_quoted(tag['end'])}")
        rules.append(f"json{i}: %json {json.dumps(schema)}")
    piece = " | ".join(f"tag{i}" for i in range(len(source["tags"])))
    more = f" ({_quoted(source['separator'])} piece)*" if source["is_many"] else ""
    return "\n".join([f"start: piece{more}", f"piece: {piece}", *rules])


def _quoted(text: str) -> str:
    """A Lark string. It may not be empty there, so an empty text is a rule that matches nothing else."""
    return json.dumps(text, ensure_ascii=False) if text else '""'
