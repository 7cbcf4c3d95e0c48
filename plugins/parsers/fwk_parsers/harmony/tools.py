"""Finds messages to functions."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from fwk.types import GrammarRequest
from fwk_parsers._common.call_grammar import Call, arguments_of, either, json_value, request, text
from fwk_parsers._common.marked import MarkedCalls

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
TO_FUNCTION = re.compile(r"(?:^|\s|assistant)to=functions\.(?P<name>[^\s<]+)")
_RECIPIENT = "to=functions."
_ENDS = ("<|call|>", "<|end|>", "<|return|>")


class HarmonyTools(MarkedCalls):
    """Arguments are given out as they come. Other messages are left as they are: the reasoning parser reads them."""

    reads_special = True
    starts = (START, CHANNEL)
    can_start_alone = True
    is_open_first = True
    fillers = _ENDS

    def _begins(self, rest: str) -> bool | None:
        begins = super()._begins(rest)
        if begins is False and not self._has_call and rest.startswith("to=functions."):
            return True
        if begins is False and not self._has_call and "to=functions.".startswith(rest):
            return None
        return begins

    def _start(self, rest: str) -> None:
        return None

    def _header(self, text: str) -> tuple[int, str] | bool:
        end = text.find(MESSAGE)
        if end < 0:
            return True
        found = TO_FUNCTION.search(text, 0, end)
        if found is None:
            return False
        begin = end + len(MESSAGE)
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        if begin == len(text):
            return True
        return (begin, found.group("name")) if text[begin] == "{" else False

    is_many_allowed = False  # the end of a call ends the answer

    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        head = f"{CHANNEL}commentary to=functions.{tool['name']} <|constrain|>json{MESSAGE}"
        return [text(head), json_value(arguments_of(tool)), text(_ENDS[0])]

    def free_grammar(self, strict: Collection[str]) -> GrammarRequest:
        """The recipient tells a call from other messages. It stands behind the channel, or before it."""
        json_ = f" <|constrain|>json{MESSAGE}"
        heads = (json_, f" json{MESSAGE}", f"{CHANNEL}commentary{json_}", f"{CHANNEL}commentary json{MESSAGE}")
        calls: list[Call] = []
        for tool in self.context.tools:
            schema = arguments_of(tool) if tool["name"] in strict else {"type": "object"}
            head = either(*[[text(each)] for each in heads])
            calls.append([text(f"{_RECIPIENT}{tool['name']}"), head, json_value(schema)])
        return request(calls, False, {"end": _ENDS[0]}, {"trigger": _RECIPIENT, "never": []})

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        text = json.dumps(arguments, ensure_ascii=False)
        return f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}{text}<|call|>"
