"""Items of a conversation: read from a request, and told to the model as chat messages."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown, want
from fwk_server.openai_responses.tool_servers import error_text, object_of

_ROLES = ("user", "system", "developer", "assistant")
_MCP_ITEMS = {
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
"""Items about tool servers, and how their ids begin."""


def read_items(value: str | list[Any]) -> list[dict[str, Any]]:
    """The items of ``input``, in the one form in which they are listed. Raises ``InvalidRequest``."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not value:
        raise InvalidRequest("input must not be empty", "input")
    return [_item(item, f"input[{i}]") for i, item in enumerate(value)]


def new_id(kind: str) -> str:
    """A name for an item."""
    return f"{kind}_{uuid.uuid4().hex}"


def _item(item: Any, at: str) -> dict[str, Any]:
    want(item, dict, "an object", at)
    kind = item.get("type", "message")
    if kind == "message":
        return _message(item, at)
    if kind == "function_call":
        fields = {name: want(item.get(name), str, "a string", f"{at}.{name}") for name in ("call_id", "name")}
        fields["arguments"] = want(item.get("arguments"), str, "a string", f"{at}.arguments")
        return {"id": _id(item, "fc"), "type": kind, "status": "completed", **fields}
    if kind == "function_call_output":
        call_id = want(item.get("call_id"), str, "a string", f"{at}.call_id")
        output = _text(item.get("output"), f"{at}.output")
        return {"id": _id(item, "fco"), "type": kind, "status": "completed", "call_id": call_id, "output": output}
    if kind == "reasoning":
        return _reasoning(item, at)
    if kind in _MCP_ITEMS:
        return _mcp_item(item, kind, at)
    raise InvalidRequest(f"{at}: items of type {shown(kind)} are not supported here", "input")


def _mcp_item(item: Mapping[str, Any], kind: str, at: str) -> dict[str, Any]:
    found: dict[str, Any] = {"id": _id(item, _MCP_ITEMS[kind]), "type": kind}
    if kind == "mcp_approval_response":
        request = want(item.get("approval_request_id"), str, "a string", f"{at}.approval_request_id")
        reason = None if item.get("reason") is None else want(item["reason"], str, "a string", f"{at}.reason")
        found |= {"approval_request_id": request, "reason": reason}
        return found | {"approve": want(item.get("approve"), bool, "a boolean", f"{at}.approve")}
    found["server_label"] = want(item.get("server_label"), str, "a string", f"{at}.server_label")
    if kind == "mcp_list_tools":
        return found | {"tools": want(item.get("tools"), list, "an array", f"{at}.tools"), "error": None}
    for name in ("name", "arguments"):
        found[name] = want(item.get(name), str, "a string", f"{at}.{name}")
    if kind == "mcp_approval_request":
        return found
    output, error = item.get("output"), item.get("error")
    found["output"] = None if output is None else want(output, str, "a string", f"{at}.output")
    if error is not None:
        want(error, dict, "an object", f"{at}.error")
        name = "content" if error.get("type") == "mcp_tool_execution_error" else "message"
        want(error.get(name), *((list, "an array") if name == "content" else (str, "a string")), f"{at}.error.{name}")
        for i, block in enumerate(error.get("content") or ()):
            want(block, dict, "an object", f"{at}.error.content[{i}]")
    asked = item.get("approval_request_id")
    asked = None if asked is None else want(asked, str, "a string", f"{at}.approval_request_id")
    status = "completed" if error is None else "failed"
    return found | {"error": error, "approval_request_id": asked, "status": status}


def approval_responses(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The client's answers to requests for approval, by the request's id."""
    return {item["approval_request_id"]: item for item in items if item["type"] == "mcp_approval_response"}


def _id(item: Mapping[str, Any], kind: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= 128 else new_id(kind)


def _message(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(_ROLES)}, not {shown(role)}", "input")
    text = _text(item.get("content"), f"{at}.content")
    message = {"id": _id(item, "msg"), "type": "message", "role": role, "status": "completed"}
    if role == "assistant":
        return message | {"content": [{"type": "output_text", "text": text, "annotations": []}]}
    return message | {"content": [{"type": "input_text", "text": text}]}


def _reasoning(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    parts = item.get("content") or item.get("summary") or []
    texts: list[str] = []
    for i, part in enumerate(want(parts, list, "an array", f"{at}.content")):
        want(part, dict, "an object", f"{at}.content[{i}]")
        texts.append(want(part.get("text"), str, "a string", f"{at}.content[{i}].text"))
    content = [{"type": "reasoning_text", "text": "".join(texts)}] if texts else []
    return {"id": _id(item, "rs"), "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def _text(value: Any, at: str) -> str:
    """A string, or the texts of an array of parts."""
    if isinstance(value, str):
        return value
    texts: list[str] = []
    for i, part in enumerate(want(value, list, "a string or an array of parts", at)):
        kind = want(part, dict, "an object", f"{at}[{i}]").get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise InvalidRequest(f"{at}[{i}]: this route reads text only, not {shown(kind)}", "input")
        name = "refusal" if kind == "refusal" else "text"
        texts.append(want(part.get(name), str, "a string", f"{at}[{i}].{name}"))
    return "\n".join(texts)


def messages_of(instructions: str | None, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages: instructions and the system messages after them are one, as templates take no two.

    What the model thought, said and called in a row is one message of its own.
    """
    messages = [{"role": "system", "content": instructions}] if instructions else []
    turn: dict[str, Any] | None = None  # the model's, while it may continue
    answers = approval_responses(items)
    for item in items:
        if item["type"] in _MCP_ITEMS:
            result = _result(item, answers)
            if result is None:
                continue
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            arguments = item["arguments"] if object_of(item["arguments"]) is not None else "{}"  # the result says so
            _call(turn, item["id"], {**item, "arguments": arguments})
            messages.append({"role": "tool", "tool_call_id": item["id"], "content": result})
            turn = None
            continue
        if item["type"] in ("reasoning", "function_call") or item.get("role") == "assistant":
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _extend(turn, item)
            continue
        turn = None
        if item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            continue
        text = item["content"][0]["text"]
        role = "user" if item["role"] == "user" else "system"
        if role == "system" and messages and messages[-1]["role"] == "system":
            messages[-1] = {"role": role, "content": f"{messages[-1]['content']}\n\n{text}"}
        else:
            messages.append({"role": role, "content": text})
    return messages


def _extend(turn: dict[str, Any], item: Mapping[str, Any]) -> None:
    if item["type"] == "reasoning":
        thought = "".join(part["text"] for part in item["content"])
        if thought:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
    elif item["type"] == "function_call":
        _call(turn, item["call_id"], item)
    else:
        turn["content"] += "".join(part["text"] for part in item["content"])


def _call(turn: dict[str, Any], call_id: str, item: Mapping[str, Any]) -> None:
    function = {"name": item["name"], "arguments": item["arguments"]}
    turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _result(item: Mapping[str, Any], answers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The result of a tool server's call, for the model; None for items that it does not read.

    A call that was approved has an item of its own with its result; one without an answer yet is left out.
    """
    if item["type"] == "mcp_call":
        return item["output"] if item["output"] is not None else error_text(item["error"])
    answer = answers.get(item["id"]) if item["type"] == "mcp_approval_request" else None
    if answer is None or answer["approve"]:
        return None
    reason = f" {answer['reason']}" if answer["reason"] else ""
    return f"The user did not allow this call.{reason}"
