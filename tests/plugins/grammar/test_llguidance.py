"""llguidance behind the grammar interface: judged by jsonschema, re and brute force."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
from tests.helpers.grammars import JUDGED, allowed
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from fwk import GrammarRequest
from fwk.errors import FwkError, InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarContext
from fwk_grammar.llguidance import LLGuidanceOptions
from fwk_grammar.llguidance.backend import LLGuidanceBackend, LLGuidanceGrammar
from fwk_loaders.dummy.tokenizer import build_tokenizer
from fwk_tokenizer.vocabulary import Vocabulary

VOCAB, EOS = 320, 258


def context(vocab_size: int = VOCAB, eos: tuple[int, ...] = (EOS,), options: object = None) -> GrammarContext:
    """Of the byte tokeniser; ids from 320 on stand for nothing."""
    tokenizer = build_tokenizer(VOCAB, "test")
    vocabulary = Vocabulary(tokenizer)
    pieces = [vocabulary.token_bytes(i) for i in range(vocab_size)]
    return GrammarContext(tokenizer, pieces, vocabulary.special_ids, eos, options)


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(context())


def walk(grammar: Grammar, rng: random.Random, pieces: list[bytes], limit: int = 400) -> bytes | None:
    """Random allowed tokens, preferring those that say little; None when no end came."""
    text = b""
    for _ in range(limit):
        tokens = sorted(allowed(grammar, len(pieces)))
        if EOS in tokens and (rng.random() < 0.3 or tokens == [EOS]):
            assert grammar.accept(EOS)
            assert grammar.is_finished
            return text
        token = rng.choice([t for t in tokens if t != EOS and len(pieces[t]) == 1])
        assert grammar.accept(token)
        text += pieces[token]
        if grammar.is_finished:
            return text
    return None


@pytest.mark.parametrize("name", JUDGED)
def test_every_walk_through_a_grammar_makes_what_it_describes(backend: LLGuidanceBackend, name: str) -> None:
    request, judge = JUDGED[name]
    pieces = list(backend.context.token_bytes)
    start = backend.compile(request)
    texts = [walk(start.fork(), random.Random(seed), pieces) for seed in range(40)]
    ended = [text for text in texts if text is not None]
    assert len(ended) > 20
    assert len(set(ended)) > 3
    for text in ended:
        assert judge(text.decode("utf-8", "strict"))


def test_a_mask_holds_exactly_the_tokens_that_can_still_lead_to_a_choice(backend: LLGuidanceBackend) -> None:
    choices = ["a", "ab", "abc<260>", "né", "x y"]
    start = backend.compile(GrammarRequest("choice", json.dumps(choices)))
    wanted = [choice.encode() for choice in choices]
    pieces = backend.context.token_bytes
    seen = 0
    todo: list[tuple[bytes, Grammar]] = [(b"", start)]
    while todo:
        text, grammar = todo.pop()
        fit = {t for t in range(256) if any(w.startswith(text + pieces[t]) for w in wanted)}
        fit |= {t for t in range(259, VOCAB) if any(w.startswith(text + pieces[t]) for w in wanted)}
        told = allowed(grammar, VOCAB)
        assert told - {EOS} == fit or (told - {EOS} <= fit and len(told - {EOS}) == 1)  # one way only: may be forced
        assert (EOS in told) == (text in wanted)
        for token in range(VOCAB):
            copy = grammar.fork()
            if token in told:
                assert copy.accept(token)
                copy.rollback(1)
                assert allowed(copy, VOCAB) == told
                if token != EOS:
                    assert copy.accept(token)
                    todo.append((text + pieces[token], copy))
            elif token not in fit:
                assert not copy.accept(token)
                assert allowed(copy, VOCAB) == told
        seen += 1
    assert seen > 12


def test_what_is_after_the_end_is_nothing_and_can_be_taken_back(backend: LLGuidanceBackend) -> None:
    grammar = backend.compile(GrammarRequest("regex", "ab"))
    assert grammar.accept(ord("a"))
    assert not grammar.accept(EOS)
    assert not grammar.is_finished
    assert grammar.accept(ord("b"))
    assert grammar.is_finished
    assert grammar.accept(EOS)
    assert not grammar.accept(EOS)
    assert not grammar.accept(ord("b"))
    assert allowed(grammar, VOCAB) == set()
    grammar.rollback(2)
    assert not grammar.is_finished
    assert allowed(grammar, VOCAB) == {ord("b")}
    grammar.rollback(1)
    assert allowed(grammar, VOCAB) == {ord("a")}


def deep(levels: int) -> str:
    return '{"type":"array","items":' * levels + '{"type":"integer"}' + "}" * levels


WRONG = [
    ("regex", "(", "unclosed group"),
    ("regex", "(?=x)y", "look-around"),
    ("regex", "", "empty"),
    ("choice", "[]", "at least one"),
    ("choice", '[""]', "no output but the empty one"),
    ("choice", '["a", 5]', "at least one string"),
    ("choice", "a|b", "not the JSON"),
    ("choice", json.dumps([str(i) for i in range(20_001)]), "at most 20000"),
    ("json_schema", "{", "not the JSON"),
    ("json_schema", "[1]", "must be an object"),
    ("json_schema", '{"type": "person"}', "must be one of null, .* not 'person'"),
    ("json_schema", '{"not": {}}', "does not enforce 'not'"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "does not enforce 'not'"),
    ("json_schema", '{"$ref": "#"}', "the grammar"),
    ("json_schema", '{"$ref": "#/$defs/missing"}', "does not exist"),
    ("json_schema", '{"$ref": "http://example.com/schema"}', "does not fetch"),
    ("json_schema", '{"enum": []}', "Unsatisfiable"),
    ("json_schema", deep(200), "recursion limit"),
    ("json_schema", deep(8_000), "recursion limit|nested too deeply"),
    ("json_schema", json.dumps({"anyOf": [{"properties": {f"k{i}": {}}} for i in range(9_000)]}), "too large"),
    ("ebnf", "nonsense", "cannot be compiled"),
    ("ebnf", "start: undefined", "unknown name"),
    ("ebnf", "root ::= undefined", "not found"),
    ("ebnf", "root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000, "recursion"),
    ("ebnf", "start: " + "(" * 3_000 + '"a"' + ")" * 3_000, "nested"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "why"), WRONG)
def test_a_wrong_or_huge_grammar_is_refused_soon_with_one_sentence(
    backend: LLGuidanceBackend, kind: str, source: str, why: str
) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match=why) as caught:
        backend.compile(GrammarRequest(kind, source))  # type: ignore[arg-type]
    assert time.thread_time() - started < 4
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


LARGE = [
    ("json_schema", json.dumps({"enum": [f"value{i}" for i in range(10_000)]})),
    ("json_schema", json.dumps({"type": "array", "minItems": 2**31 - 1})),
    ("json_schema", json.dumps({"type": "string", "minLength": 10**9})),
    ("json_schema", json.dumps({"type": "string", "pattern": "^(a+)+$"})),
    ("json_schema", json.dumps({"type": "object", "properties": {f"k{i}": {} for i in range(2_000)}})),
    ("json_schema", '{"$defs":{"n":{"type":"object","properties":{"c":{"$ref":"#/$defs/n"}}}},"$ref":"#/$defs/n"}'),
    ("regex", "(a{0,1000}){0,1000}"),
    ("regex", ".*a.{24}"),
    ("choice", json.dumps([f"value{i}" for i in range(10_000)])),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source"), LARGE)
def test_a_large_grammar_is_compiled_and_followed_in_bounded_time(
    backend: LLGuidanceBackend, kind: str, source: str
) -> None:
    started = time.thread_time()
    grammar = backend.compile(GrammarRequest(kind, source))  # type: ignore[arg-type]
    assert time.thread_time() - started < 2
    rng = random.Random(0)
    for _ in range(20):
        started = time.thread_time()
        tokens = sorted(allowed(grammar, VOCAB) - {EOS})
        assert time.thread_time() - started < 0.5
        if not tokens:
            break
        assert grammar.accept(rng.choice(tokens))


def test_ids_without_a_token_are_never_allowed() -> None:
    padded = LLGuidanceBackend(context(vocab_size=350))
    everything = allowed(padded.compile(GrammarRequest("regex", "(?s:.*)")), 350)
    assert not any(token >= VOCAB or token in (256, 257) for token in everything)
    assert {ord("a"), ord("\n"), EOS, 300} <= everything


def test_a_model_without_an_end_token_can_be_constrained() -> None:
    grammar = LLGuidanceBackend(context(eos=())).compile(GrammarRequest("regex", "a+"))
    assert grammar.accept(ord("a"))
    assert allowed(grammar, VOCAB) == {ord("a")}
    grammar = LLGuidanceBackend(context(eos=())).compile(GrammarRequest("regex", "ab"))
    assert [grammar.accept(ord("a")), grammar.accept(ord("b"))] == [True, True]
    assert grammar.is_finished


def test_several_end_tokens_are_one_as_good_as_the_other() -> None:
    grammar = LLGuidanceBackend(context(eos=(256, EOS))).compile(GrammarRequest("regex", "a?"))
    assert allowed(grammar, VOCAB) == {ord("a"), 256, EOS}


def test_a_tokenizer_that_does_not_encode_byte_for_byte_is_not_asked() -> None:
    """One that puts a blank before every text, as sentencepiece does: forced text would get it as well."""
    words = ["\u2581hello", "\u2581world", "hello", *"\u2581helowrd"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(dict.fromkeys(words))}, []))
    tokenizer.normalizer = normalizers.Prepend("\u2581")  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    vocabulary = Vocabulary(tokenizer)
    size = tokenizer.get_vocab_size()
    pieces = [vocabulary.token_bytes(i) for i in range(size + 1)]
    backend = LLGuidanceBackend(GrammarContext(tokenizer, pieces, frozenset(), (size,)))
    grammar = backend.compile(GrammarRequest("regex", "hello world"))
    text = b""
    while not grammar.is_finished:
        token = min(allowed(grammar, size + 1))
        assert grammar.accept(token)
        text += pieces[token]
    assert text == b"hello world"


@pytest.mark.parametrize(
    ("options", "fits", "does_not"),
    [
        ({}, ['{"a":1}', '{"a": 1}', '{\n    "a": 1\n}'], ["{" + " " * 33]),
        ({"constrained_json_disable_any_whitespace": True}, ['{"a":1}'], ['{"a": ', "{\n"]),
        ({"constrained_json_whitespace_pattern": " ?"}, ['{"a":1}', '{ "a" : 1 }'], ["{  ", "{\n"]),
    ],
)
def test_whitespace_in_json_is_as_the_options_say(
    options: dict[str, object], fits: list[str], does_not: list[str]
) -> None:
    backend = LLGuidanceBackend(context(options=LLGuidanceOptions(**options)))  # type: ignore[arg-type]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tags = {"tags": [{"begin": "", "schema": schema, "end": ""}], "separator": "", "is_many": False}
    for request in (GrammarRequest("json_schema", json.dumps(schema)), GrammarRequest("tagged", json.dumps(tags))):
        start = backend.compile(request)
        for text in fits:
            grammar = start.fork()
            assert all(grammar.accept(byte) for byte in text.encode())
            assert EOS in allowed(grammar, VOCAB) or grammar.is_finished
        for text in does_not:
            grammar = start.fork()
            assert not all(grammar.accept(byte) for byte in text.encode())


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "text", "is_allowed"),
    [
        (OPEN, '{"b":', False),
        ({"type": "array", "items": OPEN}, '[{"b":', False),
        ({"$defs": {"o": OPEN}, "type": "object", "properties": {"x": {"$ref": "#/$defs/o"}}}, '{"x":{"b":', False),
        ({**OPEN, "additionalProperties": True}, '{"b":', True),
        ({"type": "object"}, '{"b":', True),
        ({"allOf": [OPEN, OTHER]}, '{"b":', True),
        ({"$defs": {"o": OPEN}, "allOf": [{"$ref": "#/$defs/o"}, OTHER]}, '{"b":', True),
        ({"$defs": {"o": OPEN}, "$ref": "#/$defs/o", **OTHER}, '{"b":', True),
    ],
)
def test_objects_that_list_properties_are_closed_unless_an_option_opens_them(
    schema: dict[str, object], text: str, is_allowed: bool
) -> None:
    request = GrammarRequest("json_schema", json.dumps(schema))
    for is_open in (False, True):
        options = LLGuidanceOptions(constrained_json_open_objects=is_open)
        grammar = LLGuidanceBackend(context(options=options)).compile(request)
        assert all(grammar.accept(byte) for byte in text.encode()) == (is_allowed or is_open)


def test_a_matcher_that_cannot_continue_leaves_the_masks_of_others_alone(backend: LLGuidanceBackend) -> None:
    pieces = list(backend.context.token_bytes)
    first = backend.compile(GrammarRequest("regex", "a[bc]x"))
    assert isinstance(first, LLGuidanceGrammar)
    broken, last = first.fork(), first.fork()
    assert last.accept(pieces.index(b"a"))
    assert not broken._matcher.consume_token(pieces.index(b"z"))
    rows = np.zeros((3, -(-len(pieces) // 32)), np.int32)
    raised = LLGuidanceGrammar.fill_masks([first, broken, last], rows, [0, 1, 2])
    assert list(raised) == [1]
    for row, grammar in ((rows[0], first), (rows[2], last)):
        alone = np.empty_like(row)
        grammar.fill_mask(alone)
        assert np.array_equal(row, alone)
    assert not np.array_equal(rows[0], rows[2])


def test_a_matcher_that_cannot_continue_leaves_what_others_accept_alone(backend: LLGuidanceBackend) -> None:
    pieces = list(backend.context.token_bytes)
    first = backend.compile(GrammarRequest("regex", "a[bc]x"))
    assert isinstance(first, LLGuidanceGrammar)
    broken, last = first.fork(), first.fork()
    assert not broken._matcher.consume_token(pieces.index(b"z"))
    a, b = pieces.index(b"a"), pieces.index(b"b")
    found = LLGuidanceGrammar.accept_each([first, broken, last], [a, a, b])
    assert found[0] is True
    assert isinstance(found[1], FwkError)
    assert found[2] is False
    assert last.accept(a), "a refused token changed the state"


def test_a_string_that_repeats_itself_is_ended_where_it_may_end() -> None:
    """By ``fill_mask`` and ``fill_masks`` alike, unless an option says otherwise."""
    plain = GrammarRequest("json_schema", json.dumps({"type": "string"}))
    long = GrammarRequest("json_schema", json.dumps({"type": "string", "minLength": 4096}))
    backend = LLGuidanceBackend(context())
    grammars = [backend.compile(plain), backend.compile(long)]
    for i, piece in enumerate(b'"' + b"ha " * 40):
        rows = np.zeros((2, VOCAB // 32), np.int32)
        assert not LLGuidanceGrammar.fill_masks(grammars, rows, [0, 1])
        own, other = (allowed(grammar, VOCAB) for grammar in grammars)
        assert (own == {ord('"')}) == (i == 0 or i > 80), i  # 64 tokens as those three before, looked for every 16
        assert {t for t in range(VOCAB) if rows[0, t // 32] >> t % 32 & 1} == own
        assert i == 0 or ord("x") in other
        assert LLGuidanceGrammar.accept_each(grammars, [piece, piece]) == [True, True]
    copy = grammars[0].fork()
    copy.rollback(60)
    assert ord("x") in allowed(copy, VOCAB)
    assert grammars[0].accept(ord('"'))
    assert grammars[0].accept(EOS)
    off = LLGuidanceBackend(context(options=LLGuidanceOptions(constrained_json_end_loops=False))).compile(plain)
    assert all(off.accept(piece) for piece in b'"' + b"ha " * 40)
    assert ord("x") in allowed(off, VOCAB)
