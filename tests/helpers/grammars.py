"""Grammars with an independent judge each, and plugins for tests around them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jsonschema
import numpy as np

from fwk import GrammarBackendSpec, GrammarRequest, hookimpl
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "maybe not", 'né "quoted" \\ .*+', "yesterday"]
TAGS = {
    "tags": [
        {"begin": '<call>\n{"f": ', "schema": {"type": "boolean"}, "end": "}\n</call>"},
        {"begin": '<call>\n{"g": ', "schema": {"type": "integer"}, "end": "}\n</call>"},
    ],
    "separator": "\n",
    "is_many": True,
}


def fits_schema(schema: dict[str, Any]) -> Callable[[str], bool]:
    def judge(text: str) -> bool:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        return True

    return judge


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


CALLS = r"<call>\n\{\"(f\": (true|false)|g\": -?(0|[1-9][0-9]*))\}\n</call>"
JUDGED: dict[str, tuple[GrammarRequest, Callable[[str], bool]]] = {
    "object": (GrammarRequest("json_object"), lambda text: isinstance(json.loads(text), dict)),
    "schema": (GrammarRequest("json_schema", json.dumps(PERSON)), fits_schema(PERSON)),
    "regex": (GrammarRequest("regex", "[0-9]{3}-[a-f]{2,5}|x+y"), matches("[0-9]{3}-[a-f]{2,5}|x+y")),
    "choice": (GrammarRequest("choice", json.dumps(CHOICES)), lambda text: text in CHOICES),
    "lark": (GrammarRequest("ebnf", 'start: "a" n ("," n)*\nn: /[0-9]{1,3}/'), matches("a[0-9]{1,3}(,[0-9]{1,3})*")),
    "gbnf": (GrammarRequest("ebnf", 'root ::= "x" num | "y"\nnum ::= [0-9] [0-9]?'), matches("x[0-9][0-9]?|y")),
    "tagged": (GrammarRequest("tagged", json.dumps(TAGS)), matches(f"{CALLS}(\n{CALLS})*")),
}  # fmt: skip


class OnlyDigits(Grammar):
    """Two digits, and then the end."""

    def __init__(self, vocab_size: int, num_tokens: int = 0) -> None:
        self._vocab_size, self._num_tokens = vocab_size, num_tokens

    def fill_mask(self, row: np.ndarray) -> None:
        bits = np.zeros(len(row) * 32, np.uint8)
        if not self.is_finished:
            bits[ord("0") : ord("9") + 1] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        fits = not self.is_finished and ord("0") <= token_id <= ord("9")
        self._num_tokens += fits
        return fits

    def rollback(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens

    def fork(self) -> OnlyDigits:
        return OnlyDigits(self._vocab_size, self._num_tokens)

    @property
    def is_finished(self) -> bool:
        return self._num_tokens == 2


class SlowBackend(GrammarBackend):
    """Compiles when the test says so; a regex ``raise`` fails in its first mask."""

    may_go_on = threading.Event()
    num_compiled = 0
    built_by: SimpleQueue[str] = SimpleQueue()  # threads

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        self.built_by.put(threading.current_thread().name)

    def compile(self, request: GrammarRequest) -> Grammar:
        if threading.current_thread().name.startswith("fwk-grammar"):  # in the worker, not at the door
            assert self.may_go_on.wait(20)
        SlowBackend.num_compiled += 1
        return Broken(self.context.vocab_size) if request.source == "raise" else OnlyDigits(self.context.vocab_size)


class Broken(OnlyDigits):
    def fill_mask(self, row: np.ndarray) -> None:
        raise RuntimeError("too complex")

    def fork(self) -> Broken:
        return self


class GrammarTestPlugins:
    """Declares them, as a package would."""

    @hookimpl
    def grammar_backends(self) -> list[GrammarBackendSpec]:
        return [GrammarBackendSpec(name="slow", load="tests.helpers.grammars:SlowBackend", kinds=frozenset({"regex"}))]


def allowed(grammar: Grammar, vocab_size: int) -> set[int]:
    """The tokens a state allows."""
    row = np.full(-(-vocab_size // 32), -1, np.int32)
    grammar.fill_mask(row)
    return set(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0].tolist())
