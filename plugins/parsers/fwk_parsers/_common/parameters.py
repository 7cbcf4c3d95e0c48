"""Calls whose arguments stand between marks of their own, one by one, as plain text."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from fwk_parsers._common import as_json
from fwk_parsers._common.call_grammar import (
    NAME,
    Call,
    Part,
    avoiding,
    either,
    json_value,
    plain_text,
    properties_of,
    regex,
    repeated,
    text,
    without_marks,
)
from fwk_parsers._common.marked import MarkedCalls
from fwk_parsers._common.typed import property_of, typed

_ANY = "\0"
"""Stands for the name of any argument."""


class ParameterCalls(MarkedCalls):
    """A call's name, then for each argument a mark with its name, its value and a closing mark.

    A call comes in one piece, when it ends. A value that is not closed goes up to the next argument.
    """

    head: ClassVar[re.Pattern[str]]
    """The beginning of a call, with its ``name``."""
    parameter: ClassVar[re.Pattern[str]]
    """The beginning of an argument, with its ``name``, and perhaps ``is_string``: true or false."""
    parameter_end: ClassVar[str]
    ends: ClassVar[tuple[str, ...]] = ()
    """What stands at a call's end, and is no part of a value."""

    def _read(self, text: str) -> tuple[str, str] | None:
        head = self.head.match(text)
        if head is None:
            return None
        name = head.group("name").strip()
        end = next((len(text) - len(mark) for mark in self.ends if text.endswith(mark)), len(text))
        tool = self._tools.get(name)
        body = text[head.end() : end]
        arguments: dict[str, Any] = {}
        for found, value in self._parameters(body):
            argument = found.group("name").strip()
            arguments[argument] = self._value(found, self._trimmed(value), property_of(tool, argument))
        if not arguments and body.strip():
            return _whole(name, body)
        try:
            return name, as_json(arguments)
        except ValueError:
            return None

    def _parameters(self, body: str) -> Iterator[tuple[re.Match[str], str]]:
        """Each argument's beginning and its value; linear in ``body``."""
        last = body.rfind(self.parameter_end)  # none behind it is looked for
        start = self.parameter.search(body)
        while start is not None:
            if start.end() <= last:
                end = body.index(self.parameter_end, start.end())
                after = self.parameter.search(body, end)
            else:
                after = self.parameter.search(body, start.end())
                end = after.start() if after is not None else len(body)
            yield start, body[start.end() : end]
            start = after

    def _value(self, start: re.Match[str], text: str, schema: Any) -> Any:
        return typed(text, schema)

    def _trimmed(self, value: str) -> str:
        """A value without the line ends that the format puts around it."""
        return value.removeprefix("\n").removesuffix("\n")

    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        head, end = self._around_call(tool["name"])
        given = [
            {"parts": self._argument_parts(name, schema), "is_required": is_required}
            for name, schema, is_required in properties_of(tool)
        ]
        return [text(head), *([{"arguments": given, "between": ""}] if given else []), text(end)]

    def _argument_parts(self, name: str, schema: Mapping[str, Any]) -> Call:
        marks = self._marks_of_values()
        plain = plain_text(schema, marks)
        begin, end = self._around_argument(name, is_string=plain is not None)
        part: Part = plain if plain is not None else json_value(without_marks(schema, marks))
        return [text(begin), part, text(end)]

    def _any_call_parts(self, tool: Mapping[str, Any]) -> Call:
        head, end = self._around_call(tool["name"])
        kinds = {self._around_argument(_ANY, is_string=is_string) for is_string in (True, False)}
        arguments = either(*[self._any_argument(*around) for around in sorted(kinds)])
        return [text(head), repeated([arguments]), text(end)]

    def _any_argument(self, begin: str, end: str) -> Call:
        before, _, behind = begin.partition(_ANY)
        return [text(before), regex(NAME), text(behind), regex(avoiding(self._marks_of_values())), text(end)]

    def _marks_of_values(self) -> tuple[str, ...]:
        """What no value may hold."""
        return (self.parameter_end, *self.ends, *self.closes)

    @abstractmethod
    def _around_call(self, name: str) -> tuple[str, str]:
        """What a call begins and ends with."""

    @abstractmethod
    def _around_argument(self, name: str, *, is_string: bool) -> tuple[str, str]:
        """What an argument begins and ends with."""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        return self._written(name, texts, {key for key, value in arguments.items() if isinstance(value, str)})

    @abstractmethod
    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        """A call in this format; ``strings``: the arguments that are strings."""


def _whole(name: str, body: str) -> tuple[str, str] | None:
    """A call without any argument marked: perhaps all of them are one JSON object."""
    try:
        found = json.loads(body)
        return (name, as_json(found)) if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None
