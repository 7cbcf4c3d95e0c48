"""Finds ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` in a stream of text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Any

from fwk.interfaces.parser import Parsed, ParserContext, ToolCallDelta, ToolParser
from fwk.types import GrammarRequest
from fwk_parsers._common import HeldSpace, SteppingParser, held_len
from fwk_parsers._common.call_grammar import Call, arguments_of, json_value, request, text
from fwk_parsers._common.scan import Scan, read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_HEADER = 512
"""Characters before ``arguments`` within which a call's beginning is recognised; other calls come in one piece."""

_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\n]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII
)


class _At(Enum):
    TEXT = auto()
    HEAD = auto()  # in a call, not known yet whether it is one
    WHOLE = auto()  # the same, and it will be known at its end only
    ARGUMENTS = auto()
    TAIL = auto()  # behind the arguments, before the call's closing brace
    CLOSING = auto()  # before the closing mark


class HermesParser(SteppingParser, ToolParser):
    """A call counts from the moment its name, a known tool's, and the brace of its arguments have come: from then on
    the arguments are given out as they come, whatever the model makes of them. Before, everything is held back, and
    becomes content when it turns out to be no call. A missing closing mark is forgiven.
    """

    _at: _At

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._names = {tool["name"] for tool in context.tools}
        self._at = _At.TEXT
        self._text = ""  # undecided
        self._space = HeldSpace()  # before the opening mark of the call under way
        self._scan = Scan()
        self._pieces: list[str] = []  # of the call that will be known at its end
        self._num_calls = 0
        self._is_after_call = False  # nothing but white space has come since a call

    def finish(self) -> Parsed:
        text, self._text = self._text, ""
        if self._at in (_At.HEAD, _At.WHOLE):
            content = self._no_call(text).content
            return Parsed(content=content + self._space.take())
        if self._at is not _At.TEXT:
            return Parsed()  # the rest of a call's own text
        space = self._space.take()
        return Parsed(content=text if self._is_after_call and not text else space + text)

    def grammar(self, is_many: bool) -> GrammarRequest:
        tags: list[dict[str, Any]] = [
            {
                "begin": f'{OPEN}\n{{"name": {json.dumps(tool["name"])}, "arguments": ',
                "schema": {"type": "object", **(tool.get("parameters") or {})},
                "end": f"}}\n{CLOSE}",
            }
            for tool in self.context.tools
        ]
        return GrammarRequest("tagged", json.dumps({"tags": tags, "separator": "\n", "is_many": is_many}))

    def free_grammar(self, strict: Collection[str]) -> GrammarRequest:
        calls: list[Call] = []
        for tool in self.context.tools:
            schema = arguments_of(tool) if tool["name"] in strict else {"type": "object"}
            head = f'{OPEN}\n{{"name": {json.dumps(tool["name"])}, "arguments": '
            calls.append([text(head), json_value(schema), text(f"}}\n{CLOSE}")])
        return request(calls, True, {"separator": "\n"}, {"trigger": OPEN, "never": []})

    def instructions(self) -> str:
        functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.context.tools)
        return (
            f"You may call these functions, given as JSON schemas:\n{functions}\n\n"
            f'To call one, write JSON between {OPEN} and {CLOSE} that has "name", the name of the function, and '
            '"arguments", an object of its parameters with what they are in the question.'
        )

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{OPEN}\n{super().write_call(name, arguments)}\n{CLOSE}"

    def _step(self) -> Parsed:
        match self._at:
            case _At.TEXT:
                return self._in_text()
            case _At.HEAD:
                return self._in_head()
            case _At.WHOLE:
                return self._inread_call()
            case _At.ARGUMENTS:
                return self._in_arguments()
            case _At.TAIL:
                return self._in_tail()
            case _At.CLOSING:
                return self._in_closing()

    def _in_text(self) -> Parsed:
        start = self._text.find(OPEN)
        if start < 0:
            length = len(self._text) - held_len(self._text, OPEN)
            body, self._text = self._space.add(self._text[:length]), self._text[length:]
        else:
            body, self._text = self._space.add(self._text[:start]), self._text[start + len(OPEN) :]
            self._at, self._pieces = _At.HEAD, []
        if body:
            self._is_after_call = False
        return Parsed(content=body)

    def _in_head(self) -> Parsed:
        match = _HEADER.match(self._text, 0, MAX_HEADER)
        name = _name(match.group(1)) if match is not None else None
        if match is not None and self._knows(name):
            self._text = self._text[match.end() :]
            self._at, self._scan = _At.ARGUMENTS, Scan()
            return self._call(name)
        begun = self._text[:MAX_HEADER].lstrip()
        is_decided = begun and (begun[0] != "{" or Scan().run(begun) is not None)
        if is_decided or len(self._text) >= MAX_HEADER:
            self._at, self._scan = _At.WHOLE, Scan()
        return Parsed()

    def _inread_call(self) -> Parsed:
        if not self._scan.has_begun:
            stripped = self._text.lstrip()
            if stripped and stripped[0] != "{":
                space, self._text = self._text[: len(self._text) - len(stripped)], stripped
                return self._no_call(space)
        found = self._scan.run(self._text)
        piece, self._text = self._text[: self._scan.position], self._text[self._scan.position :]
        self._scan.position = 0
        if found != "end":
            if found == "bad":
                return self._no_call(piece)
            self._pieces.append(piece)
            return Parsed()
        call = read_call("".join([*self._pieces, piece]))
        if call is None or not self._knows(call[0]):
            return self._no_call(piece)
        self._at = _At.CLOSING
        return self._call(*call)

    def _in_arguments(self) -> Parsed:
        found = self._scan.run(self._text)
        arguments, self._text = self._text[: self._scan.position], self._text[self._scan.position :]
        self._scan.position = 0
        if found is not None:
            self._at = _At.TAIL if found == "end" else _At.CLOSING
            self._scan = Scan(depth=1)
        if not arguments:
            return Parsed()
        return Parsed(tool_calls=[ToolCallDelta(self._num_calls - 1, arguments=arguments)])

    def _in_tail(self) -> Parsed:
        """The call's closing brace; members behind the arguments are skipped."""
        if not self._scan.position:
            self._text = self._text.lstrip()
            if self._text and self._text[0] not in "},":
                self._at = _At.CLOSING
        if self._at is _At.TAIL and self._scan.run(self._text) is not None:
            self._text = self._text[self._scan.position :]
            self._at = _At.CLOSING
        return Parsed()

    def _in_closing(self) -> Parsed:
        stripped = self._text.lstrip()
        if stripped.startswith(CLOSE):
            self._text = stripped[len(CLOSE) :]
        elif CLOSE.startswith(stripped):
            return Parsed()
        self._at, self._is_after_call = _At.TEXT, True
        return Parsed()

    def _knows(self, name: str | None) -> bool:
        return name is not None and (name in self._names or not self._names)

    def _call(self, name: str | None, arguments: str = "") -> Parsed:
        self._num_calls += 1
        self._space.take()
        return Parsed(tool_calls=[ToolCallDelta(self._num_calls - 1, name, arguments)])

    def _no_call(self, text: str) -> Parsed:
        """It was no call: all of it up to ``text`` is content, and what comes now is looked at again."""
        content = "".join([self._space.take(), OPEN, *self._pieces, text])
        self._at, self._is_after_call = _At.TEXT, False
        return Parsed(content=self._space.add(content))


def _name(text: str) -> str | None:
    try:
        return json.loads(text)
    except ValueError:
        return None
