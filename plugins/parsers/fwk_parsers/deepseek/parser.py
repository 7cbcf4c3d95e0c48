"""A section of calls whose arguments are plain JSON."""

# ruff: noqa: RUF001 (the marks are made of full-width bars)

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fwk_parsers._common.call_grammar import Call, arguments_of, json_value, text
from fwk_parsers._common.marked import MarkedCalls, matched

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_FENCED = re.compile(rf"{re.escape(CALL)}\s*function\s*{re.escape(SEPARATOR)}(?P<name>[^\n]+?)\s*```json\s*")
_PLAIN = re.compile(rf"{re.escape(CALL)}\s*(?P<name>[^\n<]+?)\s*{re.escape(SEPARATOR)}\s*")


class DeepSeekV31Parser(MarkedCalls):
    """DeepSeek V3.1. Arguments are given out as they come."""

    reads_special = True
    opens = (SECTION,)
    starts = (CALL,)
    can_start_alone = True
    fillers = (CALL_END,)
    closes = (SECTION_END,)
    pattern = _PLAIN

    def _start(self, rest: str) -> None:
        return None

    def _header(self, text: str) -> tuple[int, str] | bool:
        return matched(self.pattern, text)

    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        return [text(f"{CALL}{tool['name']}{SEPARATOR}"), json_value(arguments_of(tool)), text(CALL_END)]

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = f"{CALL}{name}{SEPARATOR}{json.dumps(arguments, ensure_ascii=False)}{CALL_END}"
        return f"{SECTION}{call}{SECTION_END}"


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: a type before the name, a fence around the arguments."""

    fillers = (CALL_END, "```")
    pattern = _FENCED

    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        head = f"{CALL}function{SEPARATOR}{tool['name']}\n```json\n"
        return [text(head), json_value(arguments_of(tool)), text(f"\n```{CALL_END}")]

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        fenced = f"```json\n{json.dumps(arguments, ensure_ascii=False)}\n```"
        return f"{SECTION}{CALL}function{SEPARATOR}{name}\n{fenced}{CALL_END}{SECTION_END}"
