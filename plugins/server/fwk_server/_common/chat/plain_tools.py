"""Tools in plain messages, for chat templates that show the model neither tools nor calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk.interfaces.parser import ToolParser
from fwk_server._common.chat.tools import ToolUse


def tools_in_text(messages: Sequence[dict[str, Any]], use: ToolUse | None, frontend: Frontend) -> list[dict[str, Any]]:
    """The messages, with instructions in the system message, and calls and results written out."""
    if use is None and not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return list(messages)
    parser = frontend.tool_parser(use.functions if use is not None else [], is_forced=use is None or use.is_forced)
    if parser is None or (use is not None and not parser.instructions()):
        raise InvalidRequest(
            "the model's chat template shows it no tools, and the server's tool parser has no instructions for it: "
            "start the server with --tool-call-parser auto or with a --chat-template that has tools",
            "tools",
        )
    plain = _written(messages, parser)
    if use is None:
        return plain
    if plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{parser.instructions()}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": parser.instructions()}, *plain]


def _written(messages: Sequence[Mapping[str, Any]], parser: ToolParser) -> list[dict[str, Any]]:
    """Calls as the model would have written them, results as what the user says."""
    names: dict[Any, str] = {}
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id"), "the function")
            plain.append({"role": "user", "content": f"Result of {name}: {message['content']}"})
            continue
        calls = message.get("tool_calls")
        if not calls:
            plain.append(dict(message))
            continue
        names |= {call["id"]: call["function"]["name"] for call in calls}
        written = [parser.write_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        content = "\n".join([*([message["content"]] if message["content"] else []), *written])
        plain.append({"role": message["role"], "content": content})
    return plain
