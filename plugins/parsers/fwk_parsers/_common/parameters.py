"""Calls whose arguments stand between marks of their own, one by one, as plain text."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fwk.interfaces.parser import Parsed, ParserContext, ToolCallDelta
from fwk_parsers._common import as_json, joined
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
from fwk_parsers._common.marked import At, Block, MarkBlock, MarkedCalls
from fwk_parsers._common.parameter_block import ParameterBlock
from fwk_parsers._common.typed import coerced, is_absent, property_of, typed

_ANY = "\0"
"""Stands for the name of any argument."""


class ParameterCalls(MarkedCalls):
    """A call's name, then for each argument a mark with its name, its value and a closing mark.

    A call comes in one piece, when it ends. A value that is not closed goes up to the next argument, or to the call's
    end; that is known when the text ends.
    """

    head: ClassVar[re.Pattern[str]]
    """The beginning of a call, with its ``name``."""
    parameter_begin: ClassVar[str]
    """How ``parameter`` begins."""
    parameter: ClassVar[re.Pattern[str]]
    """The beginning of an argument, with its ``name``, and perhaps ``is_string``: true or false."""
    parameter_end: ClassVar[str]
    ends: ClassVar[tuple[str, ...]] = ()
    """What stands at a call's end, and is no part of a value."""
    margin: ClassVar[str] = ""
    """What the format puts on either side of a value."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._is_over = False  # the text has ended within a value that nothing closes

    def _start(self, rest: str) -> Block:
        if self._is_over:
            return MarkBlock(self.ends, self.closes)
        return ParameterBlock(self.parameter_begin, self.parameter, self.parameter_end, self.ends, self.closes)

    def finish(self) -> Parsed:
        if self._at is not At.BLOCK or self._is_over:
            return super().finish()
        text = "".join([*self._pieces, self._text])
        self._pieces, self._text, self._is_over = [], "", True
        self._block = self._start(text)
        return joined([self.feed(text), super().finish()])

    def _read(self, text: str) -> tuple[str, str] | None:
        head = self.head.match(text)
        if head is None:
            return None
        name = head.group("name").strip()
        end = next((len(text) - len(mark) for mark in self.ends if text.endswith(mark)), len(text))
        tool = self._tools.get(name)
        root = (tool or {}).get("parameters")
        body = text[head.end() : end]
        arguments: dict[str, Any] = {}
        found = self._block.found if isinstance(self._block, ParameterBlock) else list(self._parameters(body))
        for start, value in found:
            argument, plain = start.group("name").strip(), self._trimmed(value)
            schema = property_of(tool, argument)
            if not is_absent(plain, schema, root):
                arguments[argument] = self._value(start, plain, schema, root)
        try:
            if not found and body.strip():
                return name, as_json(coerced(_whole(body), root, root))
            return name, as_json(arguments)
        except (ValueError, RecursionError):
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

    def _value(self, start: re.Match[str], text: str, schema: Any, root: Any) -> Any:
        return typed(text, schema, root)

    def _trimmed(self, value: str) -> str:
        return value.removeprefix(self.margin).removesuffix(self.margin)

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
        """With all arguments as one JSON object where they cannot be read back one by one."""
        tool = self._tools.get(name, {"name": name})
        texts = {
            key: _text_of(value, property_of(tool, key), tool.get("parameters")) for key, value in arguments.items()
        }
        written = self._written(name, texts, {key for key, value in arguments.items() if isinstance(value, str)})
        reader = type(self)(replace(self.context, tools=[tool]))
        read = joined([reader.feed(written), reader.finish()])
        wanted = [ToolCallDelta(0, name, as_json(arguments))]
        if read.tool_calls == wanted or not arguments:
            return written
        head, end = self._around_call(name)
        frame, whole = self._frame(), as_json(arguments).replace("<", "\\u003c")  # no mark can be in it
        return f"{frame['begin']}{head}{whole}\n{end}{frame['end']}"

    @abstractmethod
    def _written(self, name: str, values: Mapping[str, str], strings: set[str]) -> str:
        """A call in this format; ``strings``: the arguments that are strings."""


def _whole(body: str) -> Any:
    """A call without any argument marked: perhaps all of them are one JSON object. Raises ``ValueError``."""
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("no arguments")
    return found


def _text_of(value: Any, schema: Any, root: Any) -> str:
    """A value as templates write it; a string in quotes where it would be taken for something else."""
    quoted = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return quoted
    return quoted if typed(value, schema, root) != value and typed(quoted, schema, root) == value else value
