"""Grammars compiled and followed by XGrammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

import xgrammar
from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext
from fwk.types import GrammarRequest
from fwk_grammar._common.delayed import compile_delayed
from fwk_grammar._common.keywords import Reading, readable
from fwk_grammar._common.sources import SpecialTokens, choices_of, literal, read_json, schema_of, source_of
from fwk_grammar.xgrammar import XGrammarOptions
from fwk_grammar.xgrammar.calls import CallFormats

MAX_WHITESPACE = 32
READING = Reading(
    "xgrammar",
    frozenset(
        [
            "type",
            "enum",
            "const",
            "properties",
            "required",
            "additionalProperties",
            "minProperties",
            "maxProperties",
            "items",
            "prefixItems",
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
            "pattern",
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "anyOf",
            "oneOf",
            "$ref",
        ]
    ),
    tells_keys_apart=False,
)
"""Of XGrammar 0.2."""

MAX_MESSAGE = 300
NO_TEXT = b"\xff"
"""A byte that no text has."""


class XGrammarBackend(GrammarBackend):
    """Compiles without holding the interpreter's lock; parts of grammars are compiled once for all requests."""

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        self._options = context.options or XGrammarOptions()
        self._has_blanks = not self._options.constrained_json_disable_any_whitespace
        # Special tokens are no text: grammars name them by id. Empty ones could never come at all.
        special = context.special_ids | set(context.eos_token_ids)
        pieces = [NO_TEXT if i in special else bytes(piece) for i, piece in enumerate(context.token_bytes)]
        # A model without an end token gets an id behind its last one, which is never sampled.
        self._end_ids = list(context.eos_token_ids) or [len(pieces)]
        pieces += [b""] * (max(self._end_ids) + 1 - len(pieces))
        tokens = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=self._end_ids
        )
        self._special = SpecialTokens(context)
        self._num_words = -(-len(pieces) // 32)
        self._printable = _without_control_characters(pieces, self._num_words)
        self._compiler = xgrammar.GrammarCompiler(
            tokens, max_threads=1, cache_limit_bytes=self._options.xgrammar_cache_bytes
        )

    def compile(self, request: GrammarRequest) -> Grammar:
        if request.kind == "delayed":
            return compile_delayed(self, request)
        try:
            compiled = self._compiled(request)
            is_json = request.kind in ("json_object", "json_schema", "tagged", "structural_tag", "calls")
            allowed = self._printable if is_json else np.full(self._num_words, -1, np.int32)
            grammar = XGrammarGrammar(
                xgrammar.GrammarMatcher(compiled), allowed, frozenset(self._end_ids), self.context.tokens_of
            )
            if not grammar.allows_text():
                raise InvalidRequest("the grammar allows no output but the empty one")
        except (RuntimeError, ValueError, TypeError) as error:
            raise InvalidRequest(f"the grammar cannot be compiled: {_sentence(error)}") from None
        return grammar

    def _compiled(self, request: GrammarRequest) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        if request.kind in ("json_object", "json_schema"):
            return compiler.compile_json_schema(
                json.dumps(self._checked(schema_of(request))),
                any_whitespace=self._has_blanks,
                max_whitespace_cnt=MAX_WHITESPACE if self._has_blanks else None,
                strict_mode=False,  # what is left open was meant to be
            )
        source = source_of(request)
        if request.kind == "regex":
            return compiler.compile_regex(source)
        if request.kind == "choice":
            return compiler.compile_regex("|".join(map(literal, choices_of(source))))
        if request.kind == "tagged":
            tagged = read_json(source)
            tagged["tags"] = [{**tag, "schema": self._checked(tag["schema"])} for tag in tagged["tags"]]
            return compiler.compile_structural_tag(json.dumps(_structural_tag(tagged)))
        if request.kind == "calls":
            form = CallFormats(self._special, self._checked).of(read_json(source))
            return compiler.compile_structural_tag(json.dumps(form))
        if request.kind == "structural_tag":
            structural = read_json(source)
            tags = [_tag(tag | {"schema": self._checked(tag["schema"])}) for tag in structural["structures"]]
            form = {"type": "triggered_tags", "triggers": structural["triggers"], "tags": tags}
            return compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
        return compiler.compile_grammar(source)

    def _checked(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema as it is enforced. Raises ``InvalidRequest`` if it uses a keyword that is not."""
        return readable(schema, READING)


def _without_control_characters(pieces: list[bytes], num_words: int) -> np.ndarray:
    """[num_words] int32 bits of the tokens that JSON text may hold.

    XGrammar allows control characters other than line ends in strings, where JSON has none.
    """
    is_fine = np.zeros(num_words * 32, np.uint8)
    is_fine[: len(pieces)] = [not any(byte < 32 and byte not in b"\r\n" for byte in piece) for piece in pieces]
    return np.packbits(is_fine, bitorder="little").view(np.int32)


def _structural_tag(source: dict[str, Any]) -> dict[str, Any]:
    """Pieces of JSON between fixed texts, as XGrammar's structural tag."""
    return {
        "type": "structural_tag",
        "format": {
            "type": "tags_with_separator",
            "tags": [_tag(tag) for tag in source["tags"]],
            "separator": source["separator"],
            "at_least_one": True,
            "stop_after_first": not source["is_many"],
        },
    }


def _tag(tag: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": tag["schema"]}
    return {"type": "tag", "begin": tag["begin"], "content": content, "end": tag["end"]}


class XGrammarGrammar(Grammar):
    """A matcher, and the tokens that may come at all: ``usable`` is [num_words] int32 of bits."""

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        usable: np.ndarray,
        end_ids: frozenset[int],
        tokens_of: Callable[[str], list[int]],
    ) -> None:
        self._matcher = matcher
        self._usable = usable
        self._end_ids = end_ids
        self._tokens_of = tokens_of

    def allows_text(self) -> bool:
        """Whether any token but an end may come first."""
        row = np.zeros(len(self._usable), np.int32)
        self.fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        bits[list(self._end_ids)] = 0
        return bool(bits.any())

    def fill_mask(self, row: np.ndarray) -> None:
        if self._matcher.is_terminated():
            row[:] = 0
            return
        mask = np.full((1, len(self._usable)), -1, np.int32)  # a matcher that allows everything leaves it as it is
        self._matcher.fill_next_token_bitmask(mask)
        row[:] = (mask[0] & self._usable)[: len(row)]

    def accept(self, token_id: int) -> bool:
        if self._matcher.is_terminated() or not int(self._usable[token_id // 32]) >> token_id % 32 & 1:
            return False
        return self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fork(self) -> XGrammarGrammar:
        return XGrammarGrammar(self._matcher.fork(), self._usable, self._end_ids, self._tokens_of)

    def forced_tokens(self) -> list[int]:
        text = "" if self._matcher.is_terminated() else self._matcher.find_jump_forward_string()
        return self._tokens_of(text) if text else []

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_terminated()


def _sentence(error: Exception) -> str:
    """The last line of a message that says something: the others are where in XGrammar it happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:MAX_MESSAGE]
