"""Calls as Python would write them: ``f(a=1, b="x")``, read without running or compiling anything.

Names may have hyphens (``get-weather(city-name="x")``), as those of many tools do.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fwk_parsers._common import as_json

MAX_DEPTH = 64
"""Of lists and dicts in each other."""

_QUIET = re.compile(r"[^\"'()\[\]{}]*")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in "\"'"}
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>[rb]{0,2}(?:"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'))"""
    r"|(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<word>[A-Za-z_][\w.-]*)|(?P<sign>\*\*|[()\[\]{},:=])|(?P<end>\Z))",
    re.DOTALL,
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}


class PythonBlock:
    """A call up to its closing parenthesis."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""  # of the string under way
        self._is_escaped = False

    def run(self, text: str) -> tuple[int, bool]:
        place = 0
        while place < len(text):
            if self._quote:
                place = self._string(text, place)
                continue
            place = _end(_QUIET, text, place)
            char = text[place : place + 1]
            place += len(char)
            if char and char in "\"'":
                self._quote = char
            elif char and char in "([{":
                self._depth += 1
            elif char and char in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return place, True
        return place, False

    def _string(self, text: str, place: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        place = _end(_IN_STRING[self._quote], text, place)
        if place < len(text):
            self._is_escaped = text[place] == "\\"
            if not self._is_escaped:
                self._quote = ""
            place += 1
        return place


def read_python_call(text: str) -> tuple[str, str] | None:
    """Name and keyword arguments, as JSON, of one call with literal values; None when it is anything else."""
    try:
        return _Reader(text).call()
    except ValueError:
        return None


def read_python_value(text: str) -> Any:
    """A literal. Raises ``ValueError``."""
    reader = _Reader(text)
    value = reader.literal()
    if not reader.is_done:
        raise ValueError("text behind the literal")
    return value


class _Reader:
    """A recursive descent over tokens. Everything raises ``ValueError`` where the text is no call."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._kind, self._value = "", ""
        self._next()

    def call(self) -> tuple[str, str]:
        name = self._take("word")
        self._take("sign", "(")
        arguments: dict[str, Any] = {}
        while not self._is_at(")"):
            if self._is_at("**"):
                self._next()
                arguments |= self._mapping(0)
            else:
                key = self._take("word")
                self._take("sign", "=")
                arguments[key] = self._read(0)
            if not self._is_at(")"):
                self._take("sign", ",")
        self._next()
        if self._kind != "end":
            raise ValueError("text behind the call")
        return name, as_json(arguments)

    def literal(self) -> Any:
        return self._read(0)

    @property
    def is_done(self) -> bool:
        return self._kind == "end"

    def _read(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        kind, value = self._kind, self._value
        if kind == "sign" and value in "[({":
            return self._mapping(depth) if value == "{" else self._list(depth)
        self._next()
        if kind == "word" and value in _WORDS:
            return _WORDS[value]
        if kind == "number":
            return _number(value)
        if kind != "string":
            raise ValueError("no literal")
        parts = [_unquoted(value)]
        while self._kind == "string":  # adjacent strings are one
            parts.append(_unquoted(self._take("string")))
        return "".join(parts)

    def _list(self, depth: int) -> list[Any]:
        closing = "]" if self._take("sign") == "[" else ")"
        found: list[Any] = []
        while not self._is_at(closing):
            found.append(self._read(depth + 1))
            if not self._is_at(closing):
                self._take("sign", ",")
        self._next()
        return found

    def _mapping(self, depth: int) -> dict[str, Any]:
        self._take("sign", "{")
        found: dict[str, Any] = {}
        while not self._is_at("}"):
            key = self._read(depth + 1)
            self._take("sign", ":")
            found[key if isinstance(key, str) else json.dumps(key)] = self._read(depth + 1)
            if not self._is_at("}"):
                self._take("sign", ",")
        self._next()
        return found

    def _is_at(self, sign: str) -> bool:
        return self._kind == "sign" and self._value == sign

    def _take(self, kind: str, value: str = "") -> str:
        found = self._value
        if self._kind != kind or (value and found != value):
            raise ValueError(f"no {value or kind}")
        self._next()
        return found

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._place)
        if found is None:
            raise ValueError("no token")
        self._place = found.end()
        self._kind = found.lastgroup or ""
        self._value = found.group(self._kind)


def _unquoted(text: str) -> str:
    """A string's value; raw ones keep their backslashes."""
    start = min(place for quote in "\"'" if (place := text.find(quote)) >= 0)
    body = text[start + 1 : -1]
    return body if "r" in text[:start] else _ESCAPE.sub(_escaped, body)


def _escaped(found: re.Match[str]) -> str:
    code = found.group(1)
    if len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else found.group()
    return _ESCAPES.get(code, code if code in "\\'\"" else found.group())


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match is not None else start
