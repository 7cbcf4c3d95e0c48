"""From a request's grammar to llguidance's own notation."""

from __future__ import annotations

import json
from typing import Any

from fwk.errors import InvalidRequest
from fwk.types import GrammarRequest
from fwk_grammar._common.keywords import BINDING, Reading, has_named_and_free_keys, readable
from fwk_grammar._common.sources import SpecialTokens, choices_of, literal, read_json, schema_of, source_of
from fwk_grammar.llguidance import LLGuidanceOptions
from fwk_grammar.llguidance.calls import calls_in_lark
from llguidance import LLMatcher, grammar_from

READING = Reading(
    "llguidance",
    BINDING
    - {"not", "if", "then", "else", "$dynamicRef", "$recursiveRef", "dependencies", "dependentRequired"}
    - {"dependentSchemas", "propertyNames", "contains", "minContains", "maxContains", "uniqueItems"}
    - {"unevaluatedItems", "unevaluatedProperties"},
    merges=True,
    is_exact=False,
    formats=frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]),
    remedy="",
)
"""Of llguidance 1.6 and later."""

_ESCAPES = 'nrbtf"\\'
"""All but ``u``: with them each key is written one way."""


def notation(request: GrammarRequest, options: LLGuidanceOptions, special: SpecialTokens) -> str:
    """What ``LLMatcher`` compiles. Raises ``InvalidRequest`` for what cannot even be read."""
    if request.kind in ("json_object", "json_schema"):
        schema = readable(schema_of(request), READING, options.constrained_json_open_objects)
        return LLMatcher.grammar_from_json_schema(schema, overrides=_settings(schema, options))
    source = source_of(request)
    if request.kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if request.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(literal, choices_of(source))))
    if request.kind == "tagged":
        return LLMatcher.grammar_from_lark(_tagged(read_json(source), options))
    if request.kind in ("calls", "free_calls"):
        return LLMatcher.grammar_from_lark(
            calls_in_lark(read_json(source), special, lambda schema: _enforced(schema, options))
        )
    if request.kind == "structural_tag":
        return LLMatcher.grammar_from_lark(_structural_tag(read_json(source), options))
    try:
        return grammar_from("ebnf" if "::=" in source else "lark", source)
    except ValueError as error:
        raise InvalidRequest(f"the grammar cannot be read: {error}") from None


def _settings(schema: dict[str, Any], options: LLGuidanceOptions) -> Any:
    """Stand above what a schema says of itself (``x-guidance``); ``lenient`` would skip keywords it cannot enforce.

    Where keys are free but some, ``{"\\u0061": 1}`` would pass for another key than ``a``.
    """
    found: dict[str, Any] = {"lenient": False}
    if has_named_and_free_keys(schema):
        found["json_allowed_escapes"] = _ESCAPES
    if options.constrained_json_disable_any_whitespace:
        return found | {"whitespace_flexible": False}
    return found | {"whitespace_pattern": options.constrained_json_whitespace_pattern}


def _tagged(source: dict[str, Any], options: LLGuidanceOptions) -> str:
    """Pieces of JSON between fixed texts, in Lark."""
    rules: list[str] = []
    for i, tag in enumerate(source["tags"]):
        rules.append(f"tag{i}: {_quoted(tag['begin'])} json{i} {_quoted(tag['end'])}")
        rules.append(f"json{i}: %json {_enforced(tag['schema'], options)}")
    piece = " | ".join(f"tag{i}" for i in range(len(source["tags"])))
    more = f" ({_quoted(source['separator'])} piece)*" if source["is_many"] else ""
    return "\n".join([f"start: piece{more}", f"piece: {piece}", *rules])


def _structural_tag(source: dict[str, Any], options: LLGuidanceOptions) -> str:
    """Text with pieces of JSON in it, in Lark: each ``head`` is text up to the first trigger."""
    rules = ["start: piece* TEXT", "TEXT: /(.|\\n)*/"]
    for i, trigger in enumerate(source["triggers"]):
        rules.append(f"head{i}[lazy]: TEXT {_quoted(trigger)}")
    pieces: list[str] = []
    for i, tag in enumerate(source["structures"]):
        number = next(n for n, trigger in enumerate(source["triggers"]) if tag["begin"].startswith(trigger))
        rest = tag["begin"][len(source["triggers"][number]) :]
        rules.append(f"json{i}: %json {_enforced(tag['schema'], options)}")
        pieces.append(f"head{number} {_quoted(rest)} json{i} {_quoted(tag['end'])}")
    return "\n".join([*rules, f"piece: {' | '.join(pieces)}"])


def _enforced(schema: dict[str, Any], options: LLGuidanceOptions) -> str:
    """A schema as it stands in Lark."""
    schema = readable(schema, READING, options.constrained_json_open_objects)
    return json.dumps({**schema, "x-guidance": _settings(schema, options)})


def _quoted(text: str) -> str:
    """A Lark string. It may not be empty there, so an empty text is a rule that matches nothing else."""
    return json.dumps(text, ensure_ascii=False) if text else '""'
