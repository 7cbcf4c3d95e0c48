"""A grammar that binds the answer behind the thinking: what may come when, and that it can be taken back."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarContext
from fwk.types import GrammarRequest, SamplingParams
from fwk.types.sampling import MAX_GRAMMAR_LENGTH
from fwk_grammar.llguidance.backend import LLGuidanceBackend
from fwk_tokenizer.vocabulary import byte_of_char

EOS, OPEN, CLOSE, FINAL = 256, 257, 258, 259
VOCAB = 288
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    special = ("<end>", "<think>", "</think>", "<final>")
    vocab = {char: byte for char, byte in byte_of_char().items()} | {text: EOS + i for i, text in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(special))
    pieces = [bytes([i]) for i in range(256)] + [text.encode() for text in special] + [b""] * (VOCAB - 260)
    return LLGuidanceBackend(GrammarContext(tokenizer, pieces, frozenset(range(EOS, 260)), (EOS,), None))


def grammar_of(
    backend: LLGuidanceBackend, opens: list[int], closes: list[list[int]], follows: list[int], **request: str
) -> Grammar:
    source = {"kind": "json_schema", "source": json.dumps(SCHEMA), **request}
    asked = GrammarRequest("delayed", json.dumps({**source, "opens": opens, "closes": closes, "follows": follows}))
    return backend.compile(asked)


def allowed(grammar: Grammar) -> set[int]:
    row = np.zeros(VOCAB // 32, np.int32)
    grammar.fill_mask(row)
    masks = np.zeros((1, VOCAB // 32), np.int32)
    assert not type(grammar).fill_masks([grammar], masks, [0])
    assert np.array_equal(masks[0], row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def take(grammar: Grammar, *tokens: Any) -> Grammar:
    for token in tokens:
        for each in [token] if isinstance(token, int) else token.encode():
            assert each in allowed(grammar), (token, each)
            assert grammar.accept(each)
    return grammar


BLANK = {ord(char) for char in " \n\t\r\v\f"}


def test_the_answer_is_bound_and_nothing_before_it(backend: LLGuidanceBackend) -> None:
    grammar = grammar_of(backend, [OPEN], [[CLOSE]], [])
    assert allowed(grammar) == {OPEN, ord("{")} | BLANK
    assert allowed(take(grammar.fork(), "\n")) == {OPEN} | BLANK
    assert allowed(take(grammar.fork(), "{")) <= {ord('"')} | BLANK  # no thinking this time
    thinking = take(grammar.fork(), "\n", OPEN, 'Hm. {"b": 3} ')
    assert EOS not in allowed(thinking)
    assert len(allowed(thinking)) > 250
    assert not thinking.accept(EOS)
    answer = take(thinking, CLOSE)
    assert allowed(answer) == {ord("{")} | BLANK
    take(answer, "\n\n", '{"a": 2}')
    assert EOS in allowed(answer)
    assert not answer.fork().accept(ord("x"))
    take(answer, EOS)
    assert answer.is_finished
    answer.rollback(len('\n\n{"a": 2}') + 1)
    assert allowed(answer) == {ord("{")} | BLANK


def test_a_mark_of_several_tokens_and_what_must_follow(backend: LLGuidanceBackend) -> None:
    """Marks that are text, as Granite's, and a header before the answer, as harmony's."""
    grammar = take(grammar_of(backend, [], [list(b"Answer:"), [CLOSE]], []), "So. Answ, Answ", "er:")
    assert allowed(grammar) == {ord("{")} | BLANK
    grammar = take(grammar_of(backend, [OPEN, ord("!")], [[CLOSE]], [FINAL, ord(":")]), OPEN)
    assert grammar.forced_tokens() == [ord("!")]
    assert allowed(grammar) == {ord("!")}
    take(grammar, "!", "x", CLOSE)
    assert grammar.forced_tokens() == [FINAL, ord(":")]
    assert allowed(grammar) == {FINAL}
    assert allowed(take(grammar, FINAL, ":")) == {ord("{")}


def test_white_space_of_the_answers_own_is_left_to_it(backend: LLGuidanceBackend) -> None:
    grammar = grammar_of(backend, [OPEN], [[CLOSE]], [], kind="regex", source=r"\n?yes")
    assert allowed(grammar) == {OPEN, ord("\n"), ord("y")}
    assert allowed(take(grammar, OPEN, "x", CLOSE)) == {ord("\n"), ord("y")}


def test_tokens_can_be_taken_back_anywhere(backend: LLGuidanceBackend) -> None:
    text = [ord("\n"), OPEN, *b"Hm. Answer:", CLOSE, *b' {"a": 1}', EOS]
    for closes in ([[CLOSE]], [list(b"Answer:")]):
        start = grammar_of(backend, [OPEN], closes, [])
        tokens = text if closes == [[CLOSE]] else [token for token in text if token != CLOSE]
        rng = random.Random(3)
        grammar, done = start.fork(), 0
        for _ in range(300):
            if done < len(tokens) and rng.random() < 0.6:
                assert grammar.accept(tokens[done])
                done += 1
            elif done:
                back = rng.randint(1, min(done, 6))
                grammar.rollback(back)
                done -= back
            fresh = start.fork()
            assert all(map(fresh.accept, tokens[:done]))
            assert allowed(fresh) == allowed(grammar) == allowed(grammar.fork()), done


@pytest.mark.parametrize("length", [MAX_GRAMMAR_LENGTH, MAX_GRAMMAR_LENGTH + 1])
def test_the_limit_is_of_what_was_asked_for(length: int) -> None:
    """Whatever is written around it, and however its characters are escaped there."""
    source = {"kind": "regex", "source": "é" * length, "opens": [], "closes": [[CLOSE]], "follows": []}
    asked = GrammarRequest("delayed", json.dumps(source))
    if length == MAX_GRAMMAR_LENGTH:
        SamplingParams(grammar=asked).check(VOCAB)
        return
    with pytest.raises(InvalidRequest, match=f"the grammar has {length} characters"):
        SamplingParams(grammar=asked)
