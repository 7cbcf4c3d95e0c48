"""Calls as JSON objects between marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from fwk_parsers._common.call_grammar import Call, arguments_of, json_value, text
from fwk_parsers._common.marked import Block, JsonBlock, MarkedCalls
from fwk_parsers._common.scan import read_call


class MarkedJson(MarkedCalls):
    """``{"name": ..., "arguments": {...}}`` between marks, one, several or an array of them."""

    starts = ("{",)
    separators = ",;[]"
    arguments_key: ClassVar[str] = "arguments"
    is_array: ClassVar[bool] = False
    """Whether the model was taught an array."""
    margin: ClassVar[str] = ""
    """What the model was taught to write inside the marks, alongside the calls."""
    are_marks_each: ClassVar[bool] = False
    """Whether each call stands between marks of its own."""

    def _start(self, rest: str) -> Block:
        return JsonBlock()

    def _read(self, text: str) -> tuple[str, str] | None:
        return read_call(text)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)
        begin, end = self._around()
        return f"{begin}{call}{end}"

    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        begin, end = self._around() if self.are_marks_each else ("", "")
        head = f'{begin}{{"name": {json.dumps(tool["name"])}, "{self.arguments_key}": '
        return [text(head), json_value(arguments_of(tool)), text(f"}}{end}")]

    def _frame(self) -> dict[str, str]:
        begin, end = ("", "") if self.are_marks_each else self._around()
        return {"begin": begin, "separator": ", " if self.is_array else "\n", "end": end}

    def _around(self) -> tuple[str, str]:
        begin, end = ("[", "]") if self.is_array else ("", "")
        return f"{self.opens[0]}{self.margin}{begin}", f"{end}{self.margin}{self.closes[0] if self.closes else ''}"
