"""The tools of a chat request: which may be called, and which must."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk_server._common.body import shown, want
from fwk_server._common.chat.constraints import NO_GRAMMAR, Constraint
from fwk_server._common.chat.models import MAX_TOOLS

CHOICES = ("none", "auto", "required")

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_TOOL_PARSER = (
    "this server has no tool parser for its model: start it with --tool-call-parser, leave tools out, "
    "or set tool_choice to 'none'"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that may be called."""

    tools: list[dict[str, Any]]  # as the client sent them; templates read this shape
    constraint: Constraint | None  # when a call must be made
    is_parallel: bool

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [tool["function"] for tool in self.tools]


def read_tools(raw: Mapping[str, Any], frontend: Frontend) -> ToolUse | None:
    """The tools that may be called, if any."""
    _refuse_legacy(raw)
    tools = [
        _tool(tool, f"tools[{i}]") for i, tool in enumerate(want(raw.get("tools") or [], list, "an array", "tools"))
    ]
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"there are {len(tools)} tools; at most {MAX_TOOLS} are allowed", "tools")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", "tools")
    choice = raw.get("tool_choice")
    named = _named(choice)
    if choice is not None and choice not in CHOICES and named is None:
        raise InvalidRequest(
            f"tool_choice must be one of {', '.join(CHOICES)}, or name a function, not {shown(choice)}", "tool_choice"
        )
    if choice == "none":
        return None
    if not tools:
        if choice in (None, "auto"):
            return None
        raise InvalidRequest("tool_choice asks for a call, but there are no tools", "tool_choice")
    if frontend.tool_parser([tool["function"] for tool in tools]) is None:
        raise InvalidRequest(_NO_TOOL_PARSER, "tools")
    if named is not None and named not in names:
        raise InvalidRequest(f"tool_choice names {shown(named)}, which is not among the tools", "tool_choice")
    is_parallel = raw.get("parallel_tool_calls") is not False
    if choice in (None, "auto"):
        return ToolUse(tools, None, is_parallel)
    wanted = [tool["function"] for tool in tools if named is None or tool["function"]["name"] == named]
    return ToolUse(tools, _forced(wanted, is_parallel and named is None, frontend), is_parallel)


def _forced(functions: list[dict[str, Any]], is_many: bool, frontend: Frontend) -> Constraint:
    """The grammar that lets nothing but calls of these functions through."""
    parser = frontend.tool_parser(functions)
    assert parser is not None, "checked by the caller"
    grammar = parser.grammar(is_many)
    if grammar.kind not in frontend.grammar_kinds:
        raise InvalidRequest(f"tool_choice: {NO_GRAMMAR}: only 'auto' and 'none' can be kept", "tool_choice")
    return grammar, "tools"


def _named(choice: Any) -> str | None:
    """The function an object in ``tool_choice`` names."""
    if not isinstance(choice, dict):
        return None
    function = want(choice.get("function"), dict, "an object", "tool_choice.function")
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice.type must be 'function'", "tool_choice.type")
    return want(function.get("name"), str, "a string", "tool_choice.function.name")


def _tool(tool: Any, at: str) -> dict[str, Any]:
    want(tool, dict, "an object", at)
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"{at}.type must be 'function', not {shown(tool['type'])}", f"{at}.type")
    function = want(tool.get("function"), dict, "an object", f"{at}.function")
    where = f"{at}.function.name"
    name = want(function.get("name"), str, "a string", where)
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where} must have 1 to 64 letters, digits or _ . -, not {shown(name)}", where)
    if function.get("parameters") is not None:
        want(function["parameters"], dict, "a JSON schema", f"{at}.function.parameters")
    return tool


def _refuse_legacy(raw: Mapping[str, Any]) -> None:
    """OpenAI's first names of tools. They are fine while none may be called."""
    if raw.get("function_call") == "none":
        return
    for name, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if raw.get(name) not in (None, [], "auto"):
            raise InvalidRequest(f"{name} is OpenAI's old name: use {new}", name)
