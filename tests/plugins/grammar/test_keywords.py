"""Each keyword of draft 2020-12 and OpenAPI 3.1 binds, binds nothing, or is refused by name: judged by jsonschema."""

from __future__ import annotations

import json
from multiprocessing import get_context
from resource import RLIMIT_CPU, setrlimit
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema_specifications import REGISTRY

from fwk import GrammarRequest
from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext
from fwk_loaders.dummy.tokenizer import build_tokenizer
from fwk_tokenizer.vocabulary import Vocabulary

VOCAB, EOS = 320, 258
SECONDS = 3
NAMES = ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "format"]
NAMES += ["contentEncoding", "contentMediaType", "contentSchema", "discriminator", "xml", "externalDocs", "example"]
NAMES += ["$vocabulary", "x-anything", "$anchor", "$dynamicAnchor"]
TEXT = {"type": "string"}
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
SHUT = {"additionalProperties": False}

Case = tuple[dict[str, Any], list[Any], list[Any]]  # a schema, what keeps it, what breaks it
CASES: dict[str, list[Case]] = {
    **{name: [({"type": "null", name: "x"}, [None], [1])] for name in NAMES},
    "$schema": [
        ({"$schema": f"https://{dialect}", "type": "null"}, [None], [1])
        for dialect in ("json-schema.org/draft/2020-12/schema", "spec.openapis.org/oas/3.1/dialect/base")
    ],
    "$id": [({"$id": "http://a.b/c", "type": "null"}, [None], [1])],
    "$ref": [
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}, [None], [1]),
        ({"$ref": "#/components/schemas/n", "components": {"schemas": {"n": {"type": "null"}}}}, [None], [1]),
        ({"$ref": "#/x/n", "x": {"n": {"uniqueItems": True}}}, [[1]], [[1, 1]]),
        ({"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "null"}}}, [None], [1]),
        ({"$ref": "#/$defs/n", "maxItems": 1, "$defs": {"n": {"type": "array"}}}, [[1]], [[1, 2], 3]),
        ({"$ref": "http://a.b/c"}, [], []),
    ],
    "$defs": [({"$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}, [None], [1])],
    "$dynamicRef": [({"$dynamicRef": "#/$defs/n", "$defs": {"n": {"type": "null"}}}, [None], [1])],
    "allOf": [({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, 3.5, "a"])],
    "anyOf": [
        ({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 2}]}, [None, 2], [1, "a"]),
        ({"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]}, ["ab", "abcd"], [3, "abc"]),
        ({"anyOf": [False, {"type": "null"}]}, [None], [1]),
        ({"anyOf": [False]}, [], [1, None]),
    ],
    "oneOf": [
        ({"oneOf": [{"type": "null"}, {"enum": [1, 2]}]}, [None, 1], [3]),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, [2, 3.5], [3]),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, [2, 3], [6, 5]),
        ({"oneOf": [A | SHUT, B | SHUT]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        ({"oneOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        ({"oneOf": [A, {"type": "object", "properties": {"b": {}}}]}, [{"b": 1}], [{"a": 1}]),
        ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]}, [3, 4], [3.5]),
        ({"oneOf": [{"$ref": "#/$defs/n"}, TEXT], "$defs": {"n": {"const": "a"}}}, ["b"], ["a"]),
        ({"oneOf": [TEXT, {"const": 1}], "anyOf": [{"const": 1}, {"const": "a"}]}, [1, "a"], [2, "b"]),
    ],
    "not": [({"type": "integer", "not": {"const": 1}}, [2], [1]), ({"type": "null", "not": False}, [None], [1])],
    "if": [({"type": "integer", "if": {"minimum": 3}, "then": {"minimum": 5}}, [2, 5], [3]), ({"if": {}}, [1], [])],
    "then": [({"type": "integer", "then": {"minimum": 5}}, [1], ["a"])],
    "else": [({"type": "integer", "if": {"minimum": 3}, "else": {"maximum": 1}}, [1, 3], [2])],
    "dependentSchemas": [({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, [{}], [{"a": 1}])],
    "prefixItems": [
        ({"type": "array", "prefixItems": [{"type": "null"}, TEXT]}, [[None, "a"]], [[1], [None, 1]]),
        ({"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False}, [[None], [None, 2]], [[1]]),
        ({"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2}, [[None, 2]], [[None]]),
        ({"type": "array", "prefixItems": [{"type": "null"}] * 2, "maxItems": 1}, [[None]], [[None, None]]),
    ],
    "items": [
        ({"type": "array", "items": {"type": "null"}}, [[], [None]], [[1], 1]),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": TEXT}, [[None, "a"]], [[None, 1]]),
        ({"type": "array", "items": True}, [[], [1]], [1]),
        ({"type": "array", "items": False}, [[]], [[1]]),
        ({"type": "array", "prefixItems": [True], "items": False, "minItems": 1}, [[1]], [[], [None, 1]]),
    ],
    "contains": [({"type": "array", "contains": {"const": 1}}, [[1]], [[2]])],
    "properties": [
        ({"type": "object", "properties": {"a": {"type": "null"}}}, [{}, {"a": None}, {"b": 1}], [{"a": 1}]),
        ({"properties": {'q"\n/é': {"type": "null"}}}, [{'q"\n/é': None}], [{'q"\n/é': 1}]),
        ({"type": "object", "properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"type": "object", "properties": {"a": True}, "required": ["a"], **SHUT}, [{"a": 1}], [{"b": 1}]),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"], **SHUT}, [{"a": None}], [1, None]),
        ({"type": "object", "properties": {"a": {"title": "A"}}, "required": ["a"], **SHUT}, [{"a": 1}], [{}]),
    ],
    "patternProperties": [
        ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, [{"a": None}, {"b": 1}], [{"ab": 1}]),
        ({"type": "object", "patternProperties": {"a": {"minimum": 2}, "b": {"maximum": 3}}}, [{"ab": 2}], [{"ab": 1}]),
    ],
    "additionalProperties": [
        ({**A, **SHUT}, [{"a": 1}], [{"a": 1, "b": 1}]),
        ({"type": "object", **SHUT}, [{}], [{"a": 1}]),
        ({**A, "additionalProperties": TEXT}, [{"a": 1, "b": "x"}], [{"a": "x"}, {"a": 1, "b": 1}]),
        ({"type": "object", "additionalProperties": TEXT}, [{"b": "x"}], [{"b": 1}]),
    ],
    "propertyNames": [({"type": "object", "propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}])],
    "unevaluatedItems": [({"type": "array", "unevaluatedItems": False}, [[]], [[1]])],
    "unevaluatedProperties": [
        ({"type": "object", "unevaluatedProperties": False}, [{}], [{"a": 1}]),
        ({"type": "object", "unevaluatedProperties": True, **SHUT}, [{}], [{"a": 1}]),
    ],
    "type": [
        ({"type": ["null", "integer"]}, [None, 1], ["a", 1.5]),
        ({**A, **SHUT, "type": ["object", "null"]}, [{"a": 1}, None], [{}, 1]),
        ({**A, **SHUT, "type": "string"}, ["a"], [{"a": 1}, {}]),
        ({"type": "null", "prefixItems": [TEXT], "maxLength": 1}, [None], [["a"], "a"]),
        ({"type": ["array", "string"], "items": {"type": "null"}, "maxLength": 1}, ["a", [None]], [[1], "aa"]),
        ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
        ({"type": "null", "anyOf": [{"type": "null"}, TEXT]}, [None], ["a"]),
    ],
    "enum": [({"enum": ["a", 1, None, [1], {"a": 1.5}]}, ["a", 1, None, [1], {"a": 1.5}], [True, [True], {}])],
    "const": [
        ({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}]),
        ({"const": 2**53 + 1}, [2**53 + 1], [2**53]),
    ],
    "multipleOf": [({"type": "integer", "multipleOf": 3}, [0, -3, 6], [4])],
    "maximum": [
        ({"type": "integer", "maximum": 3}, [3, -1], [4]),
        ({"maximum": 3}, [3, "a", None], [3.5, 4]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**62)], [2**63, -(2**63) - 1]),
        ({"type": "integer", "maximum": 2**64 - 1}, [2**60], [2**64]),
    ],
    "exclusiveMaximum": [({"type": "number", "exclusiveMaximum": 3}, [2.5], [3, 4])],
    "minimum": [({"type": "number", "minimum": 3.5}, [3.5], [3.25]), ({"minimum": 2}, [2, "a"], [1])],
    "exclusiveMinimum": [({"type": "integer", "exclusiveMinimum": 3}, [4], [3])],
    "maxLength": [({**TEXT, "maxLength": 2}, ["ab", "😀é"], ["abc"]), ({"maxLength": 2}, ["ab", 1], ["abc"])],
    "minLength": [({**TEXT, "minLength": 2}, ["ab"], ["a", "😀"]), ({"minLength": 2}, ["ab", 1], ["a"])],
    "pattern": [
        ({**TEXT, "pattern": "^a+$"}, ["aa"], ["b", "ab"]),
        ({**TEXT, "pattern": "^[^a]$"}, ["b"], ["a", "bb"]),
        ({**TEXT, "pattern": "^a|b$"}, ["ac"], ["ca"]),
        ({**TEXT, "pattern": "^a*$", "maxLength": 2}, ["a"], ["aaa", "b"]),
        ({**TEXT, "pattern": "^a*$", "minLength": 2}, ["aa"], ["a", "b"]),
        ({"pattern": "^a$"}, ["a", 1], ["b"]),
    ],
    "maxItems": [({"type": "array", "maxItems": 1}, [[1]], [[1, 2]]), ({"maxItems": 1}, [[1], 1], [[1, 2]])],
    "minItems": [({"type": "array", "minItems": 1}, [[1]], [[]]), ({"minItems": 1}, [[1], 1], [[]])],
    "uniqueItems": [
        ({"type": "array", "uniqueItems": True}, [[1]], [[1, 1]]),
        ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    ],
    "maxContains": [({"type": "array", "contains": {}, "maxContains": 1}, [[1]], [[1, 1]])],
    "minContains": [({"type": "array", "contains": {}, "minContains": 2}, [[1, 1]], [[1]])],
    "maxProperties": [
        ({"type": "object", "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 1}]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 1}]),
        ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, [], [{"a": 1, "b": 1}]),
    ],
    "minProperties": [
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
        ({"type": "object", "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ],
    "required": [
        (A | SHUT, [{"a": 1}], [{}]),
        ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
        ({"type": "object", "properties": {"a": {}}, "required": ["c"], **SHUT}, [], [{"a": 1}, {}]),
    ],
    "dependentRequired": [({"type": "object", "dependentRequired": {"a": ["b"]}}, [{}], [{"a": 1}])],
}  # fmt: skip


def backend(name: str, **options: Any) -> GrammarBackend:
    """Of the byte tokeniser."""
    from fwk_grammar.llguidance import LLGuidanceOptions
    from fwk_grammar.llguidance.backend import LLGuidanceBackend
    from fwk_grammar.outlines import OutlinesOptions
    from fwk_grammar.outlines.backend import OutlinesBackend
    from fwk_grammar.xgrammar import XGrammarOptions
    from fwk_grammar.xgrammar.backend import XGrammarBackend

    made, kind = {
        "llguidance": (LLGuidanceBackend, LLGuidanceOptions),
        "xgrammar": (XGrammarBackend, XGrammarOptions),
        "outlines": (OutlinesBackend, OutlinesOptions),
    }[name]
    tokenizer = build_tokenizer(VOCAB, "test")
    vocabulary = Vocabulary(tokenizer)
    pieces = [vocabulary.token_bytes(i) for i in range(VOCAB)]
    return made(GrammarContext(tokenizer, pieces, vocabulary.special_ids, (EOS,), kind(**options)))


def allows(start: Grammar, text: str) -> bool:
    grammar = start.fork()
    return all(grammar.accept(byte) for byte in text.encode()) and (grammar.is_finished or grammar.accept(EOS))


def with_escapes(value: Any) -> str:
    """JSON whose keys are all escapes."""
    if isinstance(value, dict):
        keys = ["".join(f"\\u{ord(char):04x}" for char in key) for key in value]
        return "{" + ",".join(f'"{k}":{with_escapes(v)}' for k, v in zip(keys, value.values(), strict=True)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(with_escapes, value)) + "]"
    return json.dumps(value)


def spellings(value: Any) -> list[str]:
    plain = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    twice = [plain[:-1] + "," + plain[1:]] if isinstance(value, dict) and value else []  # each key comes twice
    return [plain, json.dumps(value), with_escapes(value), with_escapes(value).replace("{", '{"z":0,'), *twice]


def judged(backend: GrammarBackend, keyword: str, case: Case, must_allow: bool) -> str:
    """``refused``, ``bound``, or what is wrong."""
    schema, keeps, breaks = case
    try:
        start = backend.compile(GrammarRequest("json_schema", json.dumps(schema)))
    except InvalidRequest as error:
        names = [name for name in json.dumps(schema).split('"') if name in CASES]
        return "refused" if any(name in str(error) for name in names) else f"refused without its name: {error}"
    lost = [value for value in keeps if not any(allows(start, text) for text in spellings(value))] * must_allow
    if lost or (keeps and not any(allows(start, text) for value in keeps for text in spellings(value))):
        return f"does not allow {lost or keeps}"
    validator = Draft202012Validator(schema)
    passed = [text for value in breaks for text in spellings(value) if allows(start, text)]
    wrong = [text for text in passed if not validator.is_valid(json.loads(text))]
    return f"allows {wrong}" if wrong else "bound"


def check(backend: GrammarBackend, keywords: frozenset[str], strict: bool = False) -> None:
    found: dict[tuple[str, int], str] = {}
    for keyword, cases in CASES.items():
        for i, case in enumerate(cases):
            found[keyword, i] = judged(backend, keyword, case, not strict)
    wrong = {f"{CASES[key][i][0]}": told for (key, i), told in found.items() if told not in ("refused", "bound")}
    assert not wrong, "\n".join(f"{schema}: {told}" for schema, told in wrong.items())
    binding = {key for (key, _), told in found.items() if told == "bound"}
    unbound = {keyword for keyword in keywords if keyword in CASES} - binding
    assert not unbound, f"said to be enforced, and refused: {unbound}"


def _contents(name: str) -> dict[str, Any]:
    found = REGISTRY.contents(name)
    assert isinstance(found, dict)
    return found


def test_the_list_has_every_keyword_and_jsonschema_agrees_with_it() -> None:
    vocabularies = [name for name in REGISTRY if "/draft/2020-12/meta/" in name and "format-assertion" not in name]
    words = {word for name in vocabularies for word in _contents(name)["properties"]}
    assert len(words) > 50
    assert words <= CASES.keys()
    for cases in CASES.values():
        for schema, keeps, breaks in cases:
            if keeps or breaks:
                validator = Draft202012Validator(schema)
                assert all(map(validator.is_valid, keeps)), schema
                assert not any(map(validator.is_valid, breaks)), schema


def test_llguidance_enforces_each_keyword_or_refuses_it_by_name() -> None:
    from fwk_grammar.llguidance.sources import READING

    check(backend("llguidance", constrained_json_open_objects=True), READING.keywords)
    check(backend("llguidance"), READING.keywords, strict=True)


def test_xgrammar_enforces_each_keyword_or_refuses_it_by_name() -> None:
    from fwk_grammar.xgrammar.backend import READING

    check(backend("xgrammar"), READING.keywords, strict=True)


def judged_in_fork(backend: GrammarBackend, keyword: str, case: Case) -> str:
    """As ``judged``, or ``slow``: within a limit of CPU time, as the server has one."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        setrlimit(RLIMIT_CPU, (SECONDS, SECONDS))
        theirs.send(judged(backend, keyword, case, False))

    process = context.Process(target=run)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return "slow"
    finally:
        process.join()


@pytest.mark.sweep  # an automaton for each
def test_outlines_enforces_each_keyword_or_refuses_it_by_name() -> None:
    from fwk_grammar.outlines.backend import READING

    whole = backend("outlines", constrained_json_whitespace_pattern=" ?")
    told = {
        f"{keyword}: {case[0]}": judged_in_fork(whole, keyword, case)
        for keyword, cases in CASES.items()
        for case in cases
    }
    assert not {schema: found for schema, found in told.items() if found not in ("refused", "bound", "slow")}
    binding = {schema.split(":")[0] for schema, found in told.items() if found == "bound"}
    assert {"type", "enum", "const", "properties", "pattern", "oneOf", "anyOf", "$ref"} <= binding & READING.keywords


@pytest.mark.parametrize("part", [{"type": "json_schema"}, {"type": ["string", {}]}, {"format": {"type": "string"}}])
def test_a_keyword_of_no_kind_that_it_may_have_is_refused(part: dict[str, Any]) -> None:
    from fwk_grammar._common.keywords import check_shapes

    with pytest.raises(InvalidRequest, match=next(iter(part))):
        check_shapes(part)
