"""Grammars as automata over tokens, by outlines-core."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from outlines_core import Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema  # pyright: ignore[reportMissingImports] # is in the binary

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext
from fwk.types import GrammarRequest
from fwk_grammar._common.delayed import compile_delayed
from fwk_grammar._common.keywords import ALL_TYPES, BINDING, OF_TYPES, Reading, parts, readable, tokens_of
from fwk_grammar._common.sources import choices_of, literal, read_json, schema_of, source_of
from fwk_grammar.outlines import OutlinesOptions

MAX_MESSAGE = 300
_UNSAFE = ['"', "\\", *map(chr, range(32)), "\x7f"]
"""Characters that JSON strings have escaped."""

END_MARK = "\U0010ffff"
"""Stands behind every text of an automaton, as a token of its own that is never sampled: a text is whole where it may
come. outlines-core drops the transitions from a final state to one that is not (``1`` could never become ``1.5``, nor
the choice ``yes`` ``yesterday``); with the mark, only what nothing follows is final. Its first byte begins characters
of plane 16 alone, which is for private use: no token that has it is allowed, so that none is a part of the mark.
"""

_ODD = frozenset(f"\\{letter}" for letter in "bBAZkpP123456789")
"""Escapes that match no character, or one by a property."""

OF_ANY_TYPE = frozenset({"type"}).union(*OF_TYPES.values())
"""Keywords that go with the types they are of."""

READING = Reading(
    "outlines",
    frozenset(
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
        ]
    ),
    formats=frozenset(),
    tells_keys_apart=False,  # it has no others
)
"""Of outlines-core 0.2."""


class OutlinesBackend(GrammarBackend):
    """Compiles one automaton for each request."""

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        self._options = context.options or OutlinesOptions()
        # A model without an end token gets an id behind its last one, which is never sampled.
        self._end_id = context.eos_token_ids[0] if context.eos_token_ids else context.vocab_size
        self._mark_id = context.vocab_size + 1
        by_bytes: dict[bytes, list[int]] = {}
        for i, piece in enumerate(context.token_bytes):
            is_own = i in context.special_ids or i in context.eos_token_ids
            if piece and not is_own and END_MARK.encode()[0] not in piece:
                by_bytes.setdefault(bytes(piece), []).append(i)
        by_bytes[END_MARK.encode()] = [self._mark_id]
        self._vocabulary = Vocabulary(self._end_id, by_bytes)

    def compile(self, request: GrammarRequest) -> Grammar:
        if request.kind == "delayed":
            return compile_delayed(self, request)
        try:
            index = Index(f"(?:{self._pattern(request)}){END_MARK}", self._vocabulary)
        except InvalidRequest:
            raise
        except Exception as error:  # outlines-core raises exceptions of no common class
            raise InvalidRequest(f"the grammar cannot be compiled: {_sentence(error)}") from None
        if set(index.get_allowed_tokens(index.get_initial_state()) or ()) <= {self._end_id, self._mark_id}:
            raise InvalidRequest("the grammar allows no output but the empty one")
        return OutlinesGrammar(index, self._mark_id, self.context.eos_token_ids)

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
        schema = readable(schema, READING)
        for part in parts(schema):
            _check(part)
            _fit(part)
        return build_regex_from_schema(json.dumps(schema), self._options.constrained_json_whitespace_pattern)


def _check(part: dict[str, Any]) -> None:
    """Refuse what outlines-core writes into an automaton as it stands, and what it leaves out."""
    number = next((keyword for keyword in ("minItems", "maxItems") if keyword in part), None)
    if "prefixItems" in part and number is not None:
        raise READING.refused(f"{number!r} beside 'prefixItems'")
    if "prefixItems" in part and part.get("items", True) not in (True, False, {}):
        raise READING.refused("'items' beside 'prefixItems'", "list all items in prefixItems")
    if False in part.get("prefixItems", [part.get("items")]):
        raise READING.refused(f"{'prefixItems' if 'prefixItems' in part else 'items'!r} of false")
    if "pattern" in part and not is_json_safe(part["pattern"]):
        raise READING.refused(
            f"the 'pattern' {part['pattern']!r}", "anchor it with ^ and $, and leave out what matches quotes"
        )
    for name in part.get("properties", {}):
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            raise READING.refused(f"the name {name!r} in 'properties'", "use one without quotes and control characters")


def _fit(part: dict[str, Any]) -> None:
    """Write a schema as outlines-core reads it: schemas that are booleans or empty, and types and their keywords."""
    if not BINDING & part.keys():
        part["type"] = ALL_TYPES  # an empty one it writes without brackets around its alternatives
    for keyword in ("properties", "$defs", "definitions"):
        if keyword in part:
            part[keyword] = {name: {} if inner is True else inner for name, inner in part[keyword].items()}
    for keyword in ("anyOf", "prefixItems"):
        if keyword in part:
            part[keyword] = [{} if inner is True else inner for inner in part[keyword]]
    if "prefixItems" in part or part.get("items") is True:
        part.pop("items", None)  # no others may follow
    if part.get("additionalProperties") is False:
        part.setdefault("properties", {})
    if "type" in part:
        _fit_types(part, [part["type"]] if isinstance(part["type"], str) else part["type"])


def _fit_types(part: dict[str, Any], types: list[str]) -> None:
    """Leave out keywords of other types, and write several as parts of an ``anyOf``: it takes some for their type."""
    for kind in OF_TYPES.keys() - types:
        for keyword in OF_TYPES[kind] & part.keys():
            del part[keyword]
    for keyword, kind in (("properties", "object"), ("prefixItems", "array")):
        if keyword in part and len(types) > 1:
            own = {name: part.pop(name) for name in OF_TYPES[kind] & part.keys()}
            others = {name: part.pop(name) for name in OF_ANY_TYPE & part.keys()}
            part["anyOf"] = [{**own, "type": kind}, {**others, "type": [each for each in types if each != kind]}]
            return


def is_json_safe(pattern: str) -> bool:
    """Whether a pattern matches whole strings, none of which needs an escape in JSON."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return False
    for token in tokens_of(pattern[1:-1]):
        if token in (*"()|*+?{}", "(?:"):
            continue
        try:
            is_unsafe = token[:2] in _ODD or any(re.fullmatch(token, char) for char in _UNSAFE)
        except re.error:
            return False
        if is_unsafe:
            return False
    return True


class OutlinesGrammar(Grammar):
    """A state of the automaton, and those before it."""

    def __init__(self, index: Index, mark_id: int, eos_token_ids: tuple[int, ...]) -> None:
        self._index = index
        self._mark_id = mark_id
        self._eos_token_ids = eos_token_ids
        self._states: list[int | None] = [index.get_initial_state()]  # None: an end-of-sequence token came

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = 0
        state = self._states[-1]
        if state is None:
            return
        allowed = set[int](self._index.get_allowed_tokens(state) or ()) - {self._mark_id}
        if self._is_whole(state):
            allowed.update(self._eos_token_ids)
        ids = np.fromiter(allowed, np.int64, len(allowed))
        np.bitwise_or.at(row.view(np.uint32), ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))

    def accept(self, token_id: int) -> bool:
        state = self._states[-1]
        if state is None:
            return False
        if token_id in self._eos_token_ids:
            following = None
            is_allowed = self._is_whole(state)
        else:
            following = self._index.get_next_state(state, token_id)
            is_allowed = following is not None and token_id != self._mark_id
        if is_allowed:
            self._states.append(following)
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._states[-num_tokens:]

    def fork(self) -> OutlinesGrammar:
        copy = OutlinesGrammar(self._index, self._mark_id, self._eos_token_ids)
        copy._states = list(self._states)
        return copy

    @property
    def is_finished(self) -> bool:
        state = self._states[-1]
        if state is None:
            return True
        return self._is_whole(state) and set(self._index.get_allowed_tokens(state) or ()) <= {self._mark_id}

    def _is_whole(self, state: int) -> bool:
        """Whether the text up to ``state`` may end: the mark may come, and not as a part of the text."""
        behind = self._index.get_next_state(state, self._mark_id)
        return behind is not None and self._index.is_final_state(behind)


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_MESSAGE] or type(error).__name__
