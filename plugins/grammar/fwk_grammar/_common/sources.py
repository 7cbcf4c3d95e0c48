"""Reads the source of a ``GrammarRequest``. Everything raises ``InvalidRequest`` for what cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import GrammarContext
from fwk.types import GrammarRequest

MAX_CHOICES = 20_000
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


def read_json(source: str) -> Any:
    """The JSON that a grammar's source holds."""
    try:
        return json.loads(source)
    except ValueError:
        raise InvalidRequest("the grammar is not the JSON it should be") from None
    except RecursionError:
        raise InvalidRequest("the grammar's JSON is nested too deeply") from None


def schema_of(request: GrammarRequest) -> dict[str, Any]:
    """The schema of a ``json_object`` or ``json_schema`` request."""
    schema = read_json(request.source) if request.kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidRequest("the JSON schema must be an object")
    return schema


def source_of(request: GrammarRequest) -> str:
    """The source of a request that needs one."""
    if not request.source:
        raise InvalidRequest(f"the {request.kind} grammar is empty")
    return request.source


def choices_of(source: str) -> list[str]:
    """The texts of a ``choice`` request."""
    choices = read_json(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest("the choices must be an array of at least one string")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    return choices


class SpecialTokens:
    """The special tokens of a vocabulary, as fixed texts have them."""

    def __init__(self, context: GrammarContext) -> None:
        added = context.tokenizer.get_added_tokens_decoder()
        self._by_text = {added[i].content: i for i in context.special_ids if i in added and added[i].content}
        self._ends = frozenset(context.eos_token_ids)
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str) -> list[str | int]:
        """The text in pieces, special tokens as their ids."""
        found: list[str | int] = []
        place = 0
        for match in self._pattern.finditer(text):
            found += [text[place : match.start()], self._by_text[match.group()]]
            place = match.end()
        return [piece for piece in [*found, text[place:]] if piece != ""]

    def before(self, text: str) -> tuple[str, str]:
        """The text up to its first special token, and the rest."""
        match = self._pattern.search(text)
        place = match.start() if match is not None else len(text)
        return text[:place], text[place:]

    def up_to_end(self, text: str) -> str:
        """The text up to the first token in it that ends an output."""
        found = (match for match in self._pattern.finditer(text) if self._by_text[match.group()] in self._ends)
        return text[: match.start()] if (match := next(found, None)) is not None else text

    def others(self, without: Sequence[str]) -> list[int]:
        """Special tokens that end nothing and are the first of none of the texts."""
        first = {next((each for each in self.split(text) if isinstance(each, int)), -1) for text in without}
        return sorted(i for i in self._by_text.values() if i not in self._ends and i not in first)

    def ranges(self, without: Sequence[str]) -> str:
        """Those, as numbers and ranges of numbers between commas."""
        found: list[list[int]] = []
        for i in self.others(without):
            if found and found[-1][1] == i - 1:
                found[-1][1] = i
            else:
                found.append([i, i])
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def literal(text: str) -> str:
    """A regular expression that matches ``text`` and nothing else."""
    return "".join("\\" + char if char in _SPECIAL else char for char in text)
