"""XGrammar and outlines-core behind the grammar interface: judged by jsonschema, re and brute force."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tests.helpers.grammars import JUDGED, allowed

from fwk import GrammarRequest
from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext
from fwk.plugins import find, load_object
from fwk_kit.testing import GrammarBackendSuite
from fwk_kit.testing.base import installed
from fwk_loaders.dummy.tokenizer import build_tokenizer
from fwk_tokenizer.vocabulary import Vocabulary

VOCAB, EOS = 320, 258
KINDS = {
    "xgrammar": ["object", "schema", "regex", "choice", "gbnf", "tagged"],
    "outlines": ["regex", "choice", "tagged"],
}
EVERY = (*KINDS, "llguidance")


def context(eos: tuple[int, ...] = (EOS,)) -> GrammarContext:
    """Of the byte tokeniser."""
    tokenizer = build_tokenizer(VOCAB, "test")
    vocabulary = Vocabulary(tokenizer)
    return GrammarContext(tokenizer, [vocabulary.token_bytes(i) for i in range(VOCAB)], vocabulary.special_ids, eos)


@cache
def built(name: str) -> GrammarBackend:
    return load_object(find(installed(), "grammar", name))(context())


def walk(grammar: Grammar, rng: random.Random, pieces: list[bytes], limit: int = 300) -> bytes | None:
    """Random allowed tokens, closing brackets and quotes preferred; None when no end came."""
    text = b""
    for _ in range(limit):
        tokens = sorted(allowed(grammar, len(pieces)))
        if not tokens:
            return text
        if EOS in tokens and (rng.random() < 0.3 or tokens == [EOS]):
            assert grammar.accept(EOS)
            return text
        single = [t for t in tokens if t != EOS and len(pieces[t]) == 1]
        closing = [t for t in single if pieces[t] in b'}]",' and len(text) > 60]
        token = rng.choice(closing if closing and rng.random() < 0.7 else single)
        assert grammar.accept(token)
        text += pieces[token]
    return None


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds])
def test_every_walk_through_a_grammar_makes_what_it_describes(name: str, kind: str) -> None:
    backend, (request, judge) = built(name), JUDGED[kind]
    start = backend.compile(request)
    pieces = list(backend.context.token_bytes)
    texts = [walk(start.fork(), random.Random(seed), pieces) for seed in range(25)]
    ended = [text.decode("utf-8", "surrogatepass") for text in texts if text is not None]  # xgrammar allows those
    assert len(ended) > 5
    for text in ended:
        assert judge(text), text


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("kind", "source", "texts", "others"),
    [
        ("choice", '["yes", "yesterday", "y"]', ["y", "yes", "yesterday"], ["ye", "yest", "yess"]),
        ("regex", "[0-9]+([.][0-9]+)?", ["1", "12", "1.5", "12.25"], ["1.", ".5"]),
        ("regex", "(a|ab|abc)d?", ["a", "ab", "abc", "ad", "abcd"], ["ac", "b"]),
        ("json_schema", '{"type": "number"}', ["1", "-1.5", "1.5e-3"], ["1.", "1e", "-"]),
        ("json_schema", '{"enum": [1, 1.5, 15, 152]}', ["1", "1.5", "15", "152"], ["5", "151"]),
    ],
)
def test_a_text_may_go_on_where_it_may_end(
    name: str, kind: str, source: str, texts: list[str], others: list[str]
) -> None:
    start = built(name).compile(GrammarRequest(kind, source))  # type: ignore[arg-type]

    def may_be(text: str) -> bool:
        grammar = start.fork()
        taken = [byte in allowed(grammar, VOCAB) and grammar.accept(byte) for byte in text.encode()]
        return all(taken) and (grammar.is_finished or grammar.accept(EOS))

    assert [text for text in texts if not may_be(text)] == []
    assert [text for text in others if may_be(text)] == []


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "string", "maxLength": 5},
        {"enum": ["red", "green", 3, None]},
        {"const": "fixed"},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(1, 3)),
        st.builds(
            lambda properties, n: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:n],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "long name"]), inner, min_size=1, max_size=3),
            st.integers(0, 3),
        ),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    ),
    max_leaves=5,
)


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_random_schemas_are_obeyed_or_refused(name: str, schema: dict[str, object], seed: int) -> None:
    backend = built(name)
    try:
        grammar = backend.compile(GrammarRequest("json_schema", json.dumps(schema)))
    except InvalidRequest:
        return
    text = walk(grammar, random.Random(seed), list(backend.context.token_bytes))
    if text is not None:
        Draft202012Validator(schema).validate(json.loads(text.decode("utf-8", "surrogatepass")))


@pytest.mark.parametrize("name", KINDS)
def test_a_keyword_that_is_not_enforced_is_refused_with_the_backend_that_does(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 3}}}
    with pytest.raises(InvalidRequest, match=f"{name}.* does not enforce 'multipleOf'.* --grammar-backend llguidance"):
        built(name).compile(GrammarRequest("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("name", KINDS)
def test_one_of_parts_must_exclude_each_other(name: str) -> None:
    def one_of(*parts: dict[str, object]) -> GrammarRequest:
        return GrammarRequest("json_schema", json.dumps({"oneOf": parts}))

    def kind(value: str) -> dict[str, object]:
        return {"type": "object", "properties": {"kind": {"const": value}}, "required": ["kind"]}

    for parts in ([{"type": "boolean"}, {"type": "null"}], [{"enum": [1, 2]}, {"const": 3}], [kind("a"), kind("b")]):
        built(name).compile(one_of(*parts))
    for parts in ([{"type": "integer"}, {"type": "number"}], [{"enum": [1, 2]}, {"const": 2}], [kind("a"), kind("a")]):
        with pytest.raises(InvalidRequest, match="oneOf"):
            built(name).compile(one_of(*parts))


@pytest.mark.parametrize("name", KINDS)
def test_a_model_without_an_end_token_can_be_constrained(name: str) -> None:
    grammar = load_object(find(installed(), "grammar", name))(context(())).compile(GrammarRequest("choice", '["ab"]'))
    assert grammar.accept(ord("a"))
    assert grammar.accept(ord("b"))
    assert allowed(grammar, VOCAB) == set()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "("),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", "[" * 100_000),
        ("choice", "[]"),
        ("choice", '{"a": 1}'),
        ("regex", ""),
    ],
)
def test_a_wrong_grammar_is_refused_with_one_sentence(name: str, kind: str, source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        built(name).compile(GrammarRequest(kind, source))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert 10 < len(str(caught.value)) < 400


class TestXGrammar(GrammarBackendSuite):
    plugin = "xgrammar"


class TestOutlines(GrammarBackendSuite):
    plugin = "outlines"


def object_of(name: str, kind: str) -> dict[str, object]:
    return {"type": "object", "properties": {name: {"type": kind}}, "required": [name], "additionalProperties": False}


STRUCTURES = {
    "structures": [
        {"begin": "<f=add>", "schema": object_of("a", "integer"), "end": "</f>"},
        {"begin": "<f=say>", "schema": object_of("x", "boolean"), "end": "</f>"},
        {"begin": "@", "schema": {"type": "null"}, "end": ""},
    ],
    "triggers": ["<f=", "@"],
}


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("text", "taken", "ends"),
    [
        ("hello <f> there", None, True),
        ('a <f=add>{"a": 12}</f> and <f=say>{"x": true}</f>.', None, True),
        ("mail @null me", None, True),
        ("<f=sub>", "<f=s", False),
        ('<f=add>{"b"', '<f=add>{"', False),
        ('<f=add>{"a": 1}</g>', '<f=add>{"a": 1}</', False),
        ('x <f=add>{"a": 1', None, False),
    ],
)
def test_json_follows_what_triggers_it(name: str, text: str, taken: str | None, ends: bool) -> None:
    """``taken``: how much of the text is allowed, if not all of it."""
    grammar = built(name).compile(GrammarRequest("structural_tag", json.dumps(STRUCTURES))).fork()
    accepted = "".join(itertools.takewhile(lambda char: grammar.accept(ord(char)), text))
    assert accepted == (text if taken is None else taken)
    assert grammar.accept(EOS) == ends
