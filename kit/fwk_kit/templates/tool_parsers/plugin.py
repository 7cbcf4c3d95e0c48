"""Tool calls written as ``<call>NAME {"argument": 1}</call>``."""

from __future__ import annotations

import json
import re

from fwk.interfaces.parser import Parsed, ParserContext, ToolCallDelta, ToolParser
from fwk.types import GrammarRequest

OPEN, CLOSE = "<call>", "</call>"


class MineToolParser(ToolParser):
    """Holds back what could still become a call, and calls until they are whole."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._held = ""
        self._num_calls = 0

    def feed(self, text: str) -> Parsed:
        self._held += text
        out = Parsed()
        while True:
            before, mark, after = self._held.partition(OPEN)
            if not mark:
                keep = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
                cut = len(self._held) - keep
                out, self._held = out + Parsed(self._held[:cut]), self._held[cut:]
                return out
            body, end, rest = after.partition(CLOSE)
            if not end:
                self._held = mark + after
                return out + Parsed(before)
            out = out + Parsed(before) + self._call(body)
            self._held = rest

    def _call(self, body: str) -> Parsed:
        """A whole call, or its text when it is none of a known tool."""
        name, _, arguments = body.strip().partition(" ")
        known = {tool["name"] for tool in self.context.tools}
        try:
            is_call = isinstance(json.loads(arguments or "{}"), dict) and (name in known or not known)
        except ValueError:
            is_call = False
        if not is_call:
            return Parsed(f"{OPEN}{body}{CLOSE}")
        self._num_calls += 1
        return Parsed(tool_calls=[ToolCallDelta(self._num_calls - 1, name, arguments or "{}")])

    def finish(self) -> Parsed:
        held, self._held = self._held, ""
        return Parsed(held)

    def grammar(self, is_many: bool) -> GrammarRequest:
        names = "|".join(re.escape(tool["name"]) for tool in self.context.tools) or "[a-zA-Z_]+"
        call = f"<call>({names}) \\{{[^<]*\\}}</call>"
        return GrammarRequest("regex", f"({call})+" if is_many else call)
