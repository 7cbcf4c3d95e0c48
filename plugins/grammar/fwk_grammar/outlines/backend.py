"""Grammars as automata over tokens, by outlines-core."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from outlines_core import Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema  # pyright: ignore[reportMissingImports] # is in the binary

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext
from fwk.types import GrammarRequest
from fwk_grammar._common.closing import closed
from fwk_grammar._common.keywords import check_keywords
from fwk_grammar._common.sources import choices_of, literal, read_json, schema_of, source_of
from fwk_grammar.outlines import OutlinesOptions

MAX_MESSAGE = 300
ENFORCED = frozenset(
    [
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "anyOf",
        "oneOf",
        "$ref",
        "$defs",
        "definitions",
    ]
)
"""Keywords of JSON schemas that outlines-core 0.2 enforces."""


class OutlinesBackend(GrammarBackend):
    """Compiles one automaton for each request."""

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        self._options = context.options or OutlinesOptions()
        # A model without an end token gets an id behind its last one, which is never sampled.
        self._end_id = context.eos_token_ids[0] if context.eos_token_ids else context.vocab_size
        by_bytes: dict[bytes, list[int]] = {}
        for i, piece in enumerate(context.token_bytes):
            if piece and i not in context.special_ids and i not in context.eos_token_ids:
                by_bytes.setdefault(bytes(piece), []).append(i)
        self._vocabulary = Vocabulary(self._end_id, by_bytes)

    def compile(self, request: GrammarRequest) -> Grammar:
        try:
            index = Index(self._pattern(request), self._vocabulary)
        except InvalidRequest:
            raise
        except Exception as error:  # outlines-core raises exceptions of no common class
            raise InvalidRequest(f"the grammar cannot be compiled: {_sentence(error)}") from None
        if set(index.get_allowed_tokens(index.get_initial_state()) or ()) <= {self._end_id}:
            raise InvalidRequest("the grammar allows no output but the empty one")
        return OutlinesGrammar(index, self._end_id, self.context.eos_token_ids)

    def _pattern(self, request: GrammarRequest) -> str:
        if request.kind == "json_schema":
            return self._of_schema(schema_of(request))
        source = source_of(request)
        if request.kind == "tagged":
            tagged = read_json(source)
            tags = [
                f"{literal(tag['begin'])}{self._of_schema(tag['schema'])}{literal(tag['end'])}"
                for tag in tagged["tags"]
            ]
            piece = f"(?:{'|'.join(tags)})"
            return f"{piece}(?:{literal(tagged['separator'])}{piece})*" if tagged["is_many"] else piece
        if request.kind == "choice":
            return "|".join(map(literal, choices_of(source)))
        return source

    def _of_schema(self, schema: dict[str, Any]) -> str:
        schema = closed(schema)
        check_keywords(schema, ENFORCED, "outlines")
        return build_regex_from_schema(json.dumps(schema), self._options.constrained_json_whitespace_pattern)


class OutlinesGrammar(Grammar):
    """A state of the automaton, and those before it."""

    def __init__(self, index: Index, end_id: int, eos_token_ids: tuple[int, ...]) -> None:
        self._index = index
        self._end_id = end_id
        self._eos_token_ids = eos_token_ids
        self._states: list[int | None] = [index.get_initial_state()]  # None: an end-of-sequence token came

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = 0
        state = self._states[-1]
        if state is None:
            return
        allowed: set[int] = set(self._index.get_allowed_tokens(state) or ())
        allowed.discard(self._end_id)
        if self._index.is_final_state(state):
            allowed.update(self._eos_token_ids)
        ids = np.fromiter(allowed, np.int64, len(allowed))
        np.bitwise_or.at(row.view(np.uint32), ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))

    def accept(self, token_id: int) -> bool:
        state = self._states[-1]
        if state is None:
            return False
        if token_id in self._eos_token_ids:
            following = None
            is_allowed = self._index.is_final_state(state)
        else:
            following = self._index.get_next_state(state, token_id)
            is_allowed = following is not None and token_id != self._end_id
        if is_allowed:
            self._states.append(following)
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._states[-num_tokens:]

    def fork(self) -> OutlinesGrammar:
        copy = OutlinesGrammar(self._index, self._end_id, self._eos_token_ids)
        copy._states = list(self._states)
        return copy

    @property
    def is_finished(self) -> bool:
        state = self._states[-1]
        if state is None:
            return True
        return self._index.is_final_state(state) and set(self._index.get_allowed_tokens(state) or ()) <= {self._end_id}


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_MESSAGE] or type(error).__name__
