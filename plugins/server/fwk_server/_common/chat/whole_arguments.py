"""A forced call of the one function that may be called, where the chat template shows the model no tools.

A model that has learnt no format of calls writes the arguments best where it writes nothing else: small models repeat a
call's name in front of them as an argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fwk.interfaces.parser import Parsed, ParserContext, ToolCallDelta, ToolParser
from fwk.types import GrammarRequest


class WholeArgumentsParser(ToolParser):
    """All of the text is the arguments of a call of the context's one tool."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        [self._tool] = context.tools
        self._has_begun = False

    def feed(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        name = None if self._has_begun else self._tool["name"]
        self._has_begun = True
        return Parsed(tool_calls=[ToolCallDelta(0, name, text)])

    def finish(self) -> Parsed:
        return Parsed()

    def grammar(self, is_many: bool) -> GrammarRequest:
        return GrammarRequest("json_schema", json.dumps({"type": "object", **(self._tool.get("parameters") or {})}))

    def instructions(self) -> str:
        return instructions_of(self._tool)


def instructions_of(tool: Mapping[str, Any]) -> str:
    """What a model is told of the function: what it does and takes, and no word besides that could be an argument."""
    parameters = tool.get("parameters") or {}
    shown = parameters if "$defs" in parameters else parameters.get("properties") or {}
    return (
        f"Function: {tool.get('description') or tool['name']}\n"
        f"Parameters: {json.dumps(shown, ensure_ascii=False)}\n"
        "Answer with nothing but the parameters as JSON, taken from the question."
    )
