"""Grammars compiled and followed by llguidance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import cast

import numpy as np

from fwk.errors import FwkError, InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext
from fwk.types import GrammarRequest
from fwk_grammar._common.delayed import compile_delayed
from fwk_grammar._common.loops import LoopGuard, Quotes
from fwk_grammar._common.sources import SpecialTokens
from fwk_grammar.llguidance import LLGuidanceOptions
from fwk_grammar.llguidance.sources import notation
from fwk_grammar.llguidance.tokens import Tokens
from llguidance import LLExecutor, LLMatcher, LLParserLimits

LIMITS = LLParserLimits(
    max_grammar_size=50_000,  # symbols: about two seconds of compiling at the very worst
    max_lexer_states=20_000,  # of 1 to 2 kB
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 14 ms
    step_max_items=50_000,  # 3 ms
    max_items_in_row=20_000,
    verbose_errors=False,
)
_JSON = ("json_object", "json_schema")
MAX_MESSAGE = 300
MAX_THREADS = 8
"""That compute masks at once, where there are as many processors."""


class LLGuidanceBackend(GrammarBackend):
    """Compiles without holding the interpreter's lock."""

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        self._options = context.options or LLGuidanceOptions()
        self._tokens = Tokens(context)
        self._tokenizer = self._tokens.build()
        self._special = SpecialTokens(context)
        self._quotes = Quotes(self._tokens.tokens) if self._options.constrained_json_end_loops else None

    def compile(self, request: GrammarRequest) -> Grammar:
        if request.kind == "delayed":
            return compile_delayed(self, request)
        matcher = LLMatcher(
            self._tokenizer, notation(request, self._options, self._special), log_level=0, limits=LIMITS
        )
        _check(matcher)
        # The first mask finds out what compiling did not: a schema that refers to itself only, an empty choice.
        if not np.frombuffer(self._without_end(matcher.compute_bitmask()), np.uint8).any():
            _check(matcher)
            raise InvalidRequest("the grammar allows no output but the empty one")
        _check(matcher)
        guard = LoopGuard(self._quotes) if self._quotes is not None and request.kind in _JSON else None
        num_words = -(-self._tokenizer.vocab_size // 32)
        return LLGuidanceGrammar(matcher, num_words, frozenset(self._tokens.eos_token_ids), guard)

    def _without_end(self, mask: bytes) -> bytearray:
        left = bytearray(mask)
        for token_id in self._tokens.eos_token_ids:
            left[token_id // 8] &= ~(1 << token_id % 8)
        return left


class LLGuidanceGrammar(Grammar):
    """A matcher, and whether an end-of-sequence token came: that one is not told to the matcher."""

    def __init__(
        self, matcher: LLMatcher, num_words: int, eos_token_ids: frozenset[int], guard: LoopGuard | None
    ) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._eos_token_ids = eos_token_ids
        self._guard = guard
        self._has_ended = False

    def fill_mask(self, row: np.ndarray) -> None:
        if self._has_ended:
            row[:] = 0
            return
        # The matcher writes a mask of its own vocabulary, which may be a bit larger.
        own = row if len(row) == self._num_words else np.empty(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        self._raise_error()
        if own is not row:
            row[:] = own[: len(row)]
        self._narrow(row)

    @classmethod
    def fill_masks(
        cls, grammars: Sequence[Grammar], rows: np.ndarray, places: Sequence[int]
    ) -> Mapping[int, Exception]:
        own = cast(Sequence[LLGuidanceGrammar], grammars)
        is_whole = rows.shape[1] == own[0]._num_words and rows.flags["C_CONTIGUOUS"]
        if not is_whole or len(own) == 1 or any(grammar._has_ended for grammar in own):
            return super().fill_masks(grammars, rows, places)
        pairs = [(grammar._matcher, place) for grammar, place in zip(own, places, strict=True)]
        _threads().unsafe_compute_mask_ptr(pairs, rows.ctypes.data, rows.shape[1] * rows.itemsize, len(rows))
        for grammar, place in zip(own, places, strict=True):
            grammar._narrow(rows[place])
        return {
            i: FwkError(_sentence(grammar._matcher.get_error()))
            for i, grammar in enumerate(own)
            if grammar._matcher.is_error()
        }

    def accept(self, token_id: int) -> bool:
        if self._has_ended:
            return False
        if token_id in self._eos_token_ids:
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        if self._matcher.try_consume_tokens([token_id]) == 1:
            self._observe(token_id)
            return True
        self._raise_error()
        return False

    @classmethod
    def accept_each(cls, grammars: Sequence[Grammar], token_ids: Sequence[int]) -> list[bool | Exception]:
        told: list[bool | Exception] = []
        for grammar, token_id in zip(cast(Sequence[LLGuidanceGrammar], grammars), token_ids, strict=True):
            is_plain = not grammar._has_ended and token_id not in grammar._eos_token_ids
            if is_plain and grammar._matcher.try_consume_tokens([token_id]) == 1:
                grammar._observe(token_id)
                told.append(True)
            else:  # which is asked again: nothing has changed where a token was not accepted
                told += super().accept_each([grammar], [token_id])
        return told

    def rollback(self, num_tokens: int) -> None:
        if self._has_ended and num_tokens:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._raise_error()
            if self._guard is not None:
                self._guard.rollback(num_tokens)

    def fork(self) -> LLGuidanceGrammar:
        guard = self._guard.fork() if self._guard is not None else None
        copy = LLGuidanceGrammar(self._matcher.deep_copy(), self._num_words, self._eos_token_ids, guard)
        copy._has_ended = self._has_ended
        return copy

    def forced_tokens(self) -> list[int]:
        if self.is_finished:
            return []
        tokens = self._matcher.compute_ff_tokens()
        self._raise_error()
        return tokens

    @property
    def is_finished(self) -> bool:
        return self._has_ended or self._matcher.is_stopped()

    def _observe(self, token_id: int) -> None:
        if self._guard is not None:
            self._guard.accept(token_id)

    def _narrow(self, row: np.ndarray) -> None:
        if self._guard is not None and self._guard.is_looping:
            self._guard.narrow(row)

    def _raise_error(self) -> None:
        """A matcher that met a limit never leaves that state."""
        if self._matcher.is_error():
            raise FwkError(_sentence(self._matcher.get_error()))


@cache
def _threads() -> LLExecutor:
    """What computes many masks, started when the first are asked for."""
    return LLExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS))


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise InvalidRequest(f"the grammar cannot be compiled: {_sentence(matcher.get_error())}")


def _sentence(message: str) -> str:
    """The lines of a message that say something; the others draw arrows."""
    lines = [line.strip() for line in message.splitlines()]
    told = [lines[0], *(line for line in lines[1:] if line.startswith("error:"))] if lines else ["unknown error"]
    text = " ".join(told).replace("patternProperty regexes", "'patternProperties'").replace("Resource '", "'$ref' to '")
    return text[:MAX_MESSAGE].rstrip()
