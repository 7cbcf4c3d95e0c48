"""Calls as JSON objects between marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from fwk.types import GrammarRequest
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
    is_text: ClassVar[bool] = False
    """Whether the marks are plain text, which a grammar can force."""

    def _start(self, rest: str) -> Block:
        return JsonBlock()

    def _read(self, text: str) -> tuple[str, str] | None:
        return read_call(text)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)
        begin, end = self._around()
        return f"{begin}{call}{end}"

    def grammar(self, is_many: bool) -> GrammarRequest | None:
        if not self.is_text:
            return None
        begin, end = self._around()
        tags = [
            {
                "begin": f'{begin}{{"name": {json.dumps(tool["name"])}, "{self.arguments_key}": ',
                "schema": {"type": "object", **(tool.get("parameters") or {})},
                "end": f"}}{end}",
            }
            for tool in self.context.tools
        ]
        return GrammarRequest("tagged", json.dumps({"tags": tags, "separator": "\n", "is_many": is_many}))

    def _around(self) -> tuple[str, str]:
        begin, end = ("[", "]") if self.is_array else ("", "")
        return f"{self.opens[0]}{self.margin}{begin}", f"{end}{self.margin}{self.closes[0] if self.closes else ''}"
