"""Reads both notations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fwk_parsers._common.call_grammar import Call, arguments_of, either, json_value, text
from fwk_parsers._common.marked import Block, JsonBlock, MarkedCalls, matched
from fwk_parsers._common.scan import read_call

_HEADER = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*[^\[\]\s]*\s*)?(?:\[ARGS\])?\s*")
_NAME = re.compile(r"[A-Za-z0-9_]")


class MistralParser(MarkedCalls):
    """A list of calls comes call by call, arguments behind ``[ARGS]`` as they come."""

    reads_special = True
    opens = ("[TOOL_CALLS]",)
    separators = "[],;"

    def _begins(self, rest: str) -> bool:
        return rest[0] == "{" or (_NAME.match(rest) is not None and self._is_headed())

    def _is_headed(self) -> bool:
        """Whether a name may stand here: right behind the mark only."""
        return not self._has_call and "".join(self._lead).rstrip() == self.opens[0]

    def _start(self, rest: str) -> Block | None:
        return JsonBlock() if rest[0] == "{" else None

    def _read(self, text: str) -> tuple[str, str] | None:
        return read_call(text)

    def _header(self, text: str) -> tuple[int, str] | bool:
        return matched(_HEADER, text)

    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        arguments = json_value(arguments_of(tool))
        listed = [text(f'[{{"name": {json.dumps(tool["name"])}, "arguments": '), arguments, text("}]")]
        return [either(listed, [text(f"{tool['name']}[ARGS]"), arguments])]

    def _frame(self) -> dict[str, str]:
        return {"begin": self.opens[0], "separator": self.opens[0], "end": ""}

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.opens[0]}{json.dumps([{'name': name, 'arguments': arguments}], ensure_ascii=False)}"
