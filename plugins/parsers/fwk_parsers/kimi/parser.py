"""A section of calls, each with an id that holds its name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fwk_parsers._common.call_grammar import Call, arguments_of, json_value, regex, text
from fwk_parsers._common.marked import MarkedCalls, matched

CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEADER = re.compile(
    rf"{re.escape(CALL)}\s*(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?\s*{re.escape(ARGUMENTS)}\s*",
)


class KimiParser(MarkedCalls):
    """Arguments are given out as they come."""

    reads_special = True
    opens = ("<|tool_calls_section_begin|>",)
    starts = (CALL,)
    can_start_alone = True
    fillers = (CALL_END,)
    closes = ("<|tool_calls_section_end|>",)

    def _start(self, rest: str) -> None:
        return None

    def _header(self, text: str) -> tuple[int, str] | bool:
        return matched(_HEADER, text)

    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        head, number = text(f"{CALL}functions.{tool['name']}:"), regex("[0-9]{1,3}")
        return [head, number, text(ARGUMENTS), json_value(arguments_of(tool)), text(CALL_END)]

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = f"{CALL}functions.{name}:0{ARGUMENTS}{json.dumps(arguments, ensure_ascii=False)}{CALL_END}"
        return f"{self.opens[0]}{call}{self.closes[0]}"
