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
        self._held = ""  # what could still become OPEN
        self._body: list[str] | None = None  # of the call that is open
        self._num_calls = 0

    def feed(self, text: str) -> Parsed:
        """In time linear in the text: each character is looked at a bounded number of times."""
        out = Parsed()
        while True:
            if self._body is None:
                before, mark, text = (self._held + text).partition(OPEN)
                if not mark:
                    keep = next((n for n in range(len(OPEN) - 1, 0, -1) if before.endswith(OPEN[:n])), 0)
                    cut = len(before) - keep
                    self._held = before[cut:]
                    return out + Parsed(before[:cut])
                out, self._held, self._body = out + Parsed(before), "", []
            tail = "".join(self._body[1 - len(CLOSE) :])  # pieces of a character at least: enough for a cut mark
            if text:
                self._body.append(text)
            if CLOSE not in tail[1 - len(CLOSE) :] + text:
                return out
            body, _, text = "".join(self._body).partition(CLOSE)
            self._body = None
            out = out + self._call(body)

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
        held = self._held if self._body is None else OPEN + "".join(self._body)
        self._held, self._body = "", None
        return Parsed(held)

    def grammar(self, is_many: bool) -> GrammarRequest:
        names = "|".join(re.escape(tool["name"]) for tool in self.context.tools) or "[a-zA-Z_]+"
        call = f"<call>({names}) \\{{[^<]*\\}}</call>"
        return GrammarRequest("regex", f"({call})+" if is_many else call)
