"""Finds calls in Python's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, ClassVar

from fwk_parsers._common.call_grammar import Call, UnwritableSchema, json_value, properties_of, regex, text
from fwk_parsers._common.marked import Block, MarkedCalls
from fwk_parsers._common.python_calls import PythonBlock, read_python_call

_MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_WORD = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*", re.ASCII)
_FIRST_CALL = r"\s*[\[\],;][\s\[\],;]*[A-Za-z_][A-Za-z0-9_.-]*\("
"""The beginning of an answer that is calls."""


class PythonicParser(MarkedCalls):
    """A list of calls; without marks it has to be the beginning of the answer."""

    reads_special = True
    opens = ("<|python_start|>",)
    closes: ClassVar[tuple[str, ...]] = ("<|python_end|>",)
    is_open_first = True
    separators = "[],;"
    brackets: ClassVar[tuple[str, str]] = ("[", "]")
    between: ClassVar[str] = ", "

    def _begins(self, rest: str) -> bool | None:
        """A name and a parenthesis, behind a bracket, an opening mark or another call."""
        found = _NAME.match(rest)
        if found is None or found.end() > _MAX_NAME:
            return False
        if not self._has_call and not any(piece.strip() for piece in self._lead):
            return False
        return None if found.end() == len(rest) else rest[found.end()] == "("

    def _start(self, rest: str) -> Block:
        return PythonBlock()

    def _read(self, text: str) -> tuple[str, str] | None:
        return read_python_call(text)

    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        self._check_names(tool["name"])
        given: list[dict[str, Any]] = []
        for name, schema, is_required in properties_of(tool):
            self._check_names(name)
            given.append({"parts": [text(f"{name}="), json_value(schema)], "is_required": is_required})
        inner = [{"arguments": given, "between": ", "}] if given else []
        return [text(f"{tool['name']}("), *inner, text(")")]

    def _any_call_parts(self, tool: Mapping[str, Any]) -> Call:
        self._check_names(tool["name"])
        quoted = r"\"(?:[^\"\\]|\\(?:.|\n))*\"|'(?:[^'\\]|\\(?:.|\n))*'"
        return [text(f"{tool['name']}("), regex(f"(?:[^()\"']|{quoted})*"), text(")")]

    @staticmethod
    def _check_names(name: str) -> None:
        if _WORD.fullmatch(name) is None:
            raise UnwritableSchema(f"no name of a call: {name}")

    def _frame(self) -> dict[str, str]:
        begin, end = self.brackets
        return {"begin": begin, "separator": self.between, "end": end}

    def _free(self) -> dict[str, Any]:
        return super()._free() if not self.is_open_first else {"unlike": _FIRST_CALL, "never": list(self.opens)}

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        items = list(arguments.items())
        named = list(takewhile(lambda item: _WORD.fullmatch(item[0]), items))
        values = [f"{key}={_python(value)}" for key, value in named]
        if others := dict(items[len(named) :]):  # what is no name, and all behind it
            values.append(f"**{others!r}")
        return f"{self.brackets[0]}{name}({', '.join(values)}){self.brackets[1]}"


class LfmParser(PythonicParser):
    """The same between marks of its own."""

    opens = ("<|tool_call_start|>",)
    closes = ("<|tool_call_end|>",)
    is_open_first = False
    brackets = ("<|tool_call_start|>[", "]<|tool_call_end|>")


class OlmoParser(PythonicParser):
    """One call a line between marks."""

    opens = ("<function_calls>",)
    closes = ("</function_calls>",)
    is_open_first = False
    brackets = ("<function_calls>\n", "\n</function_calls>")
    between = "\n"


def _python(value: Any) -> str:
    """A value as a Python literal."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
