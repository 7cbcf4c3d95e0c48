"""What every grammar backend must do."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarBackendSpec, GrammarContext, GrammarRequest
from fwk.plugins import Registered
from fwk_kit.testing.served import ServedSuite

VOCAB, EOS = 320, 258
"""Of the byte tokeniser: ids below 256 are bytes, the next few special, the others stand for nothing."""

SAMPLES: dict[str, tuple[GrammarRequest, Callable[[str], bool]]] = {
    "regex": (GrammarRequest("regex", "[0-9]{3}-[a-f]{2,5}|x+y"), re.compile("[0-9]{3}-[a-f]{2,5}|x+y").fullmatch),  # type: ignore[dict-item]
    "choice": (GrammarRequest("choice", json.dumps(["yes", "no", 'né "q"'])), ["yes", "no", 'né "q"'].__contains__),
    "json_object": (GrammarRequest("json_object"), lambda text: isinstance(json.loads(text), dict)),
    "json_schema": (
        GrammarRequest("json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})),
        lambda text: all(type(part) is bool for part in json.loads(text)),
    ),
}
"""A request of each kind, and a judge that is not a grammar backend."""

WRONG = {"regex": "(", "json_schema": "{", "choice": "[]", "ebnf": "start: )("}


def allowed(grammar: Grammar) -> set[int]:
    """The tokens of a filled mask; every bit must be written."""
    row = np.full(-(-VOCAB // 32), -1, np.int32)
    grammar.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]
    other = np.zeros_like(row)
    grammar.fill_mask(other)
    assert np.array_equal(bits, np.unpackbits(other.view(np.uint8), bitorder="little")[:VOCAB]), (
        "bits are left as found"
    )
    return set(np.flatnonzero(bits).tolist())


class GrammarBackendSuite(ServedSuite):
    """Random walks through grammars, judged by ``re`` and ``json``."""

    family = "grammar"
    interface = GrammarBackend

    def backend(self, item: Registered) -> GrammarBackend:
        """One over a byte tokeniser."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - a heavy library

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        characters = {byte: chr(byte) for byte in printable}
        characters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in set(printable))}
        assert sorted(characters.values()) == alphabet
        vocab = {character: byte for byte, character in characters.items()}
        vocab |= {f"<special {i}>": i for i in range(256, 260)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        tokenizer.add_special_tokens([f"<special {i}>" for i in range(256, 260)])
        pieces = [bytes([i]) if i < 256 else b"" for i in range(VOCAB)]
        special = frozenset(range(256, 260))
        return self.make(item, GrammarContext(tokenizer, pieces, special, (EOS,), self.given(item)))

    def kinds(self, item: Registered) -> list[str]:
        """Those of the samples it declares."""
        assert isinstance(item.declaration, GrammarBackendSpec)
        found = sorted(item.declaration.kinds & set(SAMPLES))
        if not found:
            pytest.skip(f"none of {', '.join(SAMPLES)} is among its kinds: set served_request to one that is")
        return found

    def walk(self, grammar: Grammar, rng: random.Random) -> bytes | None:
        """Random allowed tokens up to an end; None when none came."""
        text = b""
        for _ in range(200):
            tokens = allowed(grammar)
            if not tokens or grammar.is_finished:
                return text
            if EOS in tokens and (rng.random() < 0.3 or tokens == {EOS}):
                assert grammar.accept(EOS)
                return text
            choices = sorted(token for token in tokens if token < 256)
            assert choices, f"after {text!r} tokens without text are allowed: {tokens}"
            closing = [token for token in choices if chr(token) in '}]"']
            token = rng.choice(closing if closing and rng.random() < 0.5 else choices)
            assert grammar.accept(token), f"an allowed token was not accepted after {text!r}"
            text += bytes([token])
        return None

    def exercise(self, item: Registered) -> None:
        self.test_walks_make_what_the_grammar_describes(item)

    def test_kinds_are_declared(self, item: Registered) -> None:
        assert isinstance(item.declaration, GrammarBackendSpec)
        assert item.declaration.kinds, "a grammar backend without kinds compiles nothing"

    def test_walks_make_what_the_grammar_describes(self, item: Registered) -> None:
        backend = self.backend(item)
        for kind in self.kinds(item):
            request, judge = SAMPLES[kind]
            ended = [text for seed in range(15) if (text := self.walk(backend.compile(request), random.Random(seed)))]
            assert ended, f"no walk through {kind} comes to an end"
            for text in ended:
                assert judge(text.decode()), f"{kind}: {text!r}"

    def test_what_is_not_allowed_is_not_accepted(self, item: Registered) -> None:
        backend = self.backend(item)
        for kind in self.kinds(item):
            grammar = backend.compile(SAMPLES[kind][0])
            before = allowed(grammar)
            for token in sorted(set(range(0, 256, 7)) - before)[:20]:
                assert not grammar.accept(token)
                assert allowed(grammar) == before, "a refused token changed the state"

    def test_masks_of_many_are_those_of_each(self, item: Registered) -> None:
        backend = self.backend(item)
        for kind in self.kinds(item):
            first = backend.compile(SAMPLES[kind][0])
            grammars, rng = [first], random.Random(5)
            for _ in range(4):  # each a token further than the one before
                follower = grammars[-1].fork()
                tokens = sorted(token for token in allowed(follower) if token < 256)
                if not tokens:
                    break
                assert follower.accept(rng.choice(tokens))
                grammars.append(follower)
            places = [2 * i + 1 for i in reversed(range(len(grammars)))]
            rows = np.full((2 * len(grammars) + 1, -(-VOCAB // 32)), 0x55555555, np.int32)
            assert not type(first).fill_masks(grammars, rows, places)
            alone = np.empty_like(rows[0])
            for grammar, place in zip(grammars, places, strict=True):
                grammar.fill_mask(alone)
                assert np.array_equal(rows[place], alone)
            assert (rows[::2] == 0x55555555).all(), "a row of no grammar was written"

    def test_many_accept_what_each_does(self, item: Registered) -> None:
        backend = self.backend(item)
        for kind in self.kinds(item):
            first, rng = backend.compile(SAMPLES[kind][0]), random.Random(7)
            tokens = [*rng.sample(range(256), 6), EOS, *sorted(allowed(first))[:2]]
            together, alone = [first.fork() for _ in tokens], [first.fork() for _ in tokens]
            for _ in range(2):  # the second time from where the first led
                accepted = [grammar.accept(token) for grammar, token in zip(alone, tokens, strict=True)]
                assert type(first).accept_each(together, tokens) == accepted
                for grammar, twin in zip(together, alone, strict=True):
                    assert allowed(grammar) == allowed(twin)
                    assert grammar.is_finished == twin.is_finished

    def test_rollback_and_fork(self, item: Registered) -> None:
        backend = self.backend(item)
        for kind in self.kinds(item):
            grammar, rng, masks, taken = backend.compile(SAMPLES[kind][0]), random.Random(3), [], []
            for _ in range(5):
                tokens = sorted(token for token in allowed(grammar) if token < 256)
                if not tokens:
                    break
                masks.append(allowed(grammar))
                taken.append(rng.choice(tokens))
                assert grammar.accept(taken[-1])
            twin = grammar.fork()
            grammar.rollback(len(taken))
            assert allowed(grammar) == masks[0]
            for token, mask in zip(taken, masks, strict=True):
                assert allowed(grammar) == mask
                assert grammar.accept(token)
            assert allowed(twin) == allowed(grammar), "the fork went back with the other"

    def test_wrong_grammars_are_refused_in_a_sentence(self, item: Registered) -> None:
        assert isinstance(item.declaration, GrammarBackendSpec)
        backend = self.backend(item)
        for kind in sorted(item.declaration.kinds & set(WRONG)):
            with pytest.raises(InvalidRequest) as caught:
                backend.compile(GrammarRequest(kind, WRONG[kind]))  # type: ignore[arg-type]
            assert str(caught.value)
