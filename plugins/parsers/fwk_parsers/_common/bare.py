"""Tool calls as JSON objects with nothing around them, at the beginning of the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any, ClassVar

from fwk.interfaces.parser import Parsed, ParserContext, ToolCallDelta, ToolParser
from fwk.types import GrammarRequest
from fwk_parsers._common import SteppingParser
from fwk_parsers._common.call_grammar import Call, arguments_of, json_value, literal, request, text
from fwk_parsers._common.scan import Scan, read_call

MAX_LEAD = 256
"""Characters before a call's first brace: white space, a fence, a mark."""

_KEYS = ("name", "function", "arguments", "parameters", "type", "id")
_FIRST_KEY = re.compile(rf'\{{\s*"({"|".join(_KEYS)})"')
_BEGINNING = '{"function'
_SEPARATORS = " \t\r\n,;]"


class _At(Enum):
    LEAD = auto()  # nothing but white space and what may stand before a call
    OBJECT = auto()
    BETWEEN = auto()  # behind a call
    CONTENT = auto()


class BareCalls(SteppingParser, ToolParser):
    """Reads ``{"name": ..., "arguments": {...}}`` objects, also in an array or a fence of Markdown.

    A call comes in one piece, when its object ends. An object that is no call of a known tool is content, and so is
    everything behind it.
    """

    leads: ClassVar[Sequence[str]] = ("```json", "```")
    """What may stand before the first call, longest first."""
    between: ClassVar[Sequence[str]] = ("```",)
    """What may stand between calls and behind the last, besides white space, commas and semicolons."""
    arguments_key: ClassVar[str] = "arguments"
    lead: ClassVar[str] = ""
    """What a forced call begins with."""
    separator: ClassVar[str] = "\n"

    _at: _At

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._names = {tool["name"] for tool in context.tools}
        self._at = _At.LEAD
        self._text = ""
        self._lead = ""
        self._scan = Scan(allows_marks=True)
        self._pieces: list[str] = []
        self._num_calls = 0

    def grammar(self, is_many: bool) -> GrammarRequest:
        tags = [
            {
                "begin": f'{self.lead}{{"name": {json.dumps(tool["name"])}, "{self.arguments_key}": ',
                "schema": {"type": "object", **(tool.get("parameters") or {})},
                "end": "}",
            }
            for tool in self.context.tools
        ]
        return GrammarRequest("tagged", json.dumps({"tags": tags, "separator": self.separator, "is_many": is_many}))

    def free_grammar(self, strict: Collection[str]) -> GrammarRequest:
        calls: list[Call] = []
        for tool in self.context.tools:
            schema = arguments_of(tool) if tool["name"] in strict else {"type": "object"}
            head = f'{self.lead}{{"name": {json.dumps(tool["name"])}, "{self.arguments_key}": '
            calls.append([text(head), json_value(schema), text("}")])
        marks = [mark for mark in self.leads if mark.startswith("<")]
        leads = "|".join(map(literal, self.leads))
        unlike = rf"\s*(?:(?:{leads})\s*)?(?:\[\s*)?\{{\s*\"(?:{'|'.join(_KEYS)})\""
        return request(calls, True, {"separator": self.separator}, {"unlike": unlike, "never": marks})

    def instructions(self) -> str:
        functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.context.tools)
        return (
            f"You may call these functions, given as JSON schemas:\n{functions}\n\n"
            'To call one, answer with nothing but JSON that has "name", the name of the function, and '
            f'"{self.arguments_key}", an object of its parameters with what they are in the question.\n'
            "You will then be given its result. Answer in plain text when no function is needed."
        )

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)

    def finish(self) -> Parsed:
        text = "".join([self._lead, *self._pieces, self._text])
        self._text, self._lead, self._pieces = "", "", []
        if self._at is _At.BETWEEN and any(mark.startswith(text) for mark in self.between):
            return Parsed()
        return Parsed(content=text)

    def _step(self) -> Parsed:
        match self._at:
            case _At.LEAD:
                return self._in_lead()
            case _At.OBJECT:
                return self._in_object()
            case _At.BETWEEN:
                return self._between()
            case _At.CONTENT:
                text, self._text = self._text, ""
                return Parsed(content=text)

    def _in_lead(self) -> Parsed:
        rest = self._text.lstrip()
        for lead in self.leads:
            if rest.startswith(lead):
                rest = rest[len(lead) :].lstrip()
                break
            if rest and lead.startswith(rest):
                return self._undecided()
        if rest.startswith("["):
            rest = rest[1:].lstrip()
        return self._open(rest)

    def _open(self, rest: str) -> Parsed:
        """``rest`` begins where a call's brace has to stand; it is the end of the undecided text."""
        if not rest or _BEGINNING.startswith(rest) or (len(rest) < MAX_LEAD and _may_be_key(rest)):
            return self._undecided()
        if _FIRST_KEY.match(rest) is None:
            return self._no_call()
        self._lead, self._text = self._text[: len(self._text) - len(rest)], rest
        self._at, self._scan, self._pieces = _At.OBJECT, Scan(allows_marks=True), []
        return Parsed()

    def _undecided(self) -> Parsed:
        return self._no_call() if len(self._text) > MAX_LEAD else Parsed()

    def _no_call(self) -> Parsed:
        text = "".join([self._lead, *self._pieces, self._text])
        self._text, self._lead, self._pieces, self._at = "", "", [], _At.CONTENT
        return Parsed(content=text)

    def _in_object(self) -> Parsed:
        found = self._scan.run(self._text)
        self._pieces.append(self._text[: self._scan.position])
        self._text = self._text[self._scan.position :]
        self._scan.position = 0
        if found is None:
            return Parsed()
        call = read_call("".join(self._pieces))
        if call is None or (self._names and call[0] not in self._names):
            return self._no_call()
        self._at, self._pieces, self._lead = _At.BETWEEN, [], ""
        self._num_calls += 1
        return Parsed(tool_calls=[ToolCallDelta(self._num_calls - 1, *call)])

    def _between(self) -> Parsed:
        """White space, separators and the end of a fence are no text."""
        rest = self._text.lstrip(_SEPARATORS)
        while mark := next((mark for mark in self.between if rest.startswith(mark)), None):
            rest = rest[len(mark) :].lstrip(_SEPARATORS)
        self._text = rest
        if not rest or any(mark.startswith(rest) for mark in self.between):
            return Parsed()
        return self._open(rest)


def _may_be_key(rest: str) -> bool:
    """Whether the beginning of an object may go on as a call's."""
    if not rest.startswith("{"):
        return False
    inner = rest[1:].lstrip()
    return not inner or any(f'"{key}"'.startswith(inner) for key in _KEYS)
