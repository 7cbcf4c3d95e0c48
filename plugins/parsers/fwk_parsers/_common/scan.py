"""Walking through JSON as it comes."""

from __future__ import annotations

import json
import re

from fwk_parsers._common import as_json

_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_PLAIN = re.compile(r'[^"{}\[\]<]*')


class Scan:
    """Walks through JSON piece by piece, looking for the end of the object it began in."""

    def __init__(self, depth: int = 0, *, allows_marks: bool = False) -> None:
        self.position = 0
        self._depth = depth
        self._bad = "" if allows_marks else "<"
        self._in_string = False
        self._is_escaped = False

    @property
    def has_begun(self) -> bool:
        """Whether the object's first brace has come."""
        return self._depth > 0

    def run(self, text: str) -> str | None:
        """Continue from ``position``.

        ``end``: the object ends there. ``bad``: a ``<`` outside a string is there, unless marks are allowed.
        """
        while self.position < len(text):
            if self._in_string:
                self._string(text)
                continue
            self.position = _end(_PLAIN, text, self.position)
            char = text[self.position : self.position + 1]
            if char == "<" == self._bad:
                return "bad"
            self.position += len(char)
            if char == '"':
                self._in_string = True
            elif char and char in "{[":
                self._depth += 1
            elif char and char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return "end"
        return None

    def _string(self, text: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
            self.position += 1
            return
        self.position = _end(_STRING, text, self.position)
        if self.position < len(text):
            self._in_string = text[self.position] == "\\"  # else it is the closing quote
            self._is_escaped = self._in_string  # an escape whose second character has not come yet
            self.position += 1


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match is not None else start


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call in one piece, however its members are ordered."""
    try:
        call = json.loads(text)
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None or arguments in ("", "null"):
            text, arguments = "{}", {}
        elif isinstance(arguments, str):
            text, arguments = arguments, json.loads(arguments)
        else:
            text = as_json(arguments)
    except (ValueError, RecursionError, AttributeError):
        return None
    return (name, text) if isinstance(name, str) and isinstance(arguments, dict) else None
