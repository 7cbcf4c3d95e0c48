"""OpenAI's items of a conversation: read from a request, and told to the model as chat messages."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown, want
from fwk_server._common.chat.media import NamedPart

_ROLES = ("user", "system", "developer", "assistant")
_MCP_ITEMS = {
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
"""Items about tool servers, and how their ids begin."""
COMPACTION = "compaction"
_IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")


_SERVICE_CALLS = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call")
"""Calls that OpenAI's service answered itself: their items hold no result that a model could read."""
_NO_ARGUMENTS = ("id", "type", "status", "call_id", "name", "namespace", "caller", "created_by")

Find = Callable[[str], dict[str, Any]]
"""The item of an id. Raises ``InvalidRequest``."""


def read_items(value: str | list[Any], find: Find, at: str = "input") -> list[dict[str, Any]]:
    """The items of ``input``, in the one form in which they are listed. Raises ``InvalidRequest``.

    find: an item that is referred to.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_item(item, f"{at}[{i}]", find) for i, item in enumerate(value)]


def new_id(kind: str) -> str:
    """A name for an item."""
    return f"{kind}_{uuid.uuid4().hex}"


def _item(item: Any, at: str, find: Find) -> dict[str, Any]:
    want(item, dict, "an object", at)
    kind = item.get("type") or ("message" if "role" in item or "id" not in item else "item_reference")
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
    if kind == "item_reference":
        return find(want(item.get("id"), str, "a string", f"{at}.id"))
    if kind == COMPACTION:
        summary_of(item, at)
        return {"id": _id(item, "cmp"), "type": kind, "encrypted_content": item["encrypted_content"]}
    if kind in _SERVICE_CALLS:
        return {**item, "id": _id(item, "call")}
    if isinstance(kind, str) and kind.endswith(("_call", "_call_output")):
        return _other_call(item, kind, at)
    raise InvalidRequest(f"{at}: items of type {shown(kind)} are not supported here", "input")


def _other_call(item: Mapping[str, Any], kind: str, at: str) -> dict[str, Any]:
    """A call of a tool that is no function (``custom_tool_call``, ``local_shell_call``, ...), or its result."""
    call_id = want(item.get("call_id") or item.get("id"), str, "a string", f"{at}.call_id")
    if kind.endswith("_output") and not isinstance(item.get("output"), str | list):
        raise InvalidRequest(f"{at}.output must be a string or an array", "input")
    return {**item, "id": _id(item, "ctco" if kind.endswith("_output") else "ctc"), "call_id": call_id}


def new_compaction(summary: str) -> dict[str, Any]:
    """The item that stands for what was said before. Nothing is encrypted: it is the summary, as base64."""
    content = base64.b64encode(summary.encode()).decode()
    return {"id": new_id("cmp"), "type": COMPACTION, "encrypted_content": content}


def summary_of(item: Mapping[str, Any], at: str = "input") -> str:
    """What a compaction says. Raises ``InvalidRequest`` for one of another server."""
    content = want(item.get("encrypted_content"), str, "a string", f"{at}.encrypted_content")
    try:
        return base64.b64decode(content, validate=True).decode()
    except ValueError:
        raise InvalidRequest(f"{at}.encrypted_content is not one that this server made", "input") from None


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
    message = {"id": _id(item, "msg"), "type": "message", "role": role, "status": "completed"}
    if role == "assistant":
        text = _text(item.get("content"), f"{at}.content")
        return message | {"content": [{"type": "output_text", "text": text, "annotations": []}]}
    content = item.get("content")
    if role == "user" and isinstance(content, list) and any(_is_image(part) for part in content):
        return message | {"content": [_part(part, f"{at}.content[{i}]") for i, part in enumerate(content)]}
    return message | {"content": [{"type": "input_text", "text": _text(content, f"{at}.content")}]}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") == "input_image" or _is_image_file(part))


def _is_image_file(part: Mapping[str, Any]) -> bool:
    """Whether it is a file whose name or type says that it holds an image."""
    data, name = part.get("file_data"), part.get("filename")
    is_named = isinstance(name, str) and name.lower().endswith(_IMAGE_ENDINGS)
    return part.get("type") == "input_file" and isinstance(data, str) and (is_named or data.startswith("data:image/"))


def _part(part: Any, at: str) -> dict[str, Any]:
    """A part of what a user sends with images."""
    if not _is_image(part):
        return {"type": "input_text", "text": _text([part], at)}
    if _is_image_file(part):
        data: str = part["file_data"]
        url = data if data.startswith("data:") else f"data:;base64,{data}"
        found = {"type": "input_image", "image_url": url, "file_id": None, "detail": "auto"}
        return NamedPart(found, f"{at}.file_data")
    if part.get("image_url") is None:
        raise InvalidRequest(f"{at}: images are sent in image_url: files of images are not kept here", "input")
    url = want(part["image_url"], str, "a string", f"{at}.image_url")
    found = {"type": "input_image", "image_url": url, "file_id": None, "detail": part.get("detail") or "auto"}
    return NamedPart(found, f"{at}.image_url")


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
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
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
        if item["type"] in _SERVICE_CALLS:
            continue
        if item["type"] == "reasoning" or item["type"].endswith("_call") or item.get("role") == "assistant":
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _extend(turn, item)
            continue
        turn = None
        if item["type"].endswith("_output"):
            content = item["output"] if isinstance(item["output"], str) else _flat(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            continue
        role, content = _told(item)
        last = messages[-1] if messages else None
        if role == "system" and last is not None and last["role"] == "system":
            messages[-1] = {"role": role, "content": f"{last['content']}\n\n{content}"}
        else:
            messages.append({"role": role, "content": content})
    return messages


def with_messages(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a chat request whose messages are in ``input``, as editors send them that know two APIs.

    What else has another name in ``/v1/responses`` is renamed as well. Raises ``InvalidRequest``.
    """
    given = raw.get("input")
    if given is None or raw.get("messages") is not None:
        return raw
    if not isinstance(given, str):
        want(given, list, "a string or an array of items", "input")
    instructions = raw.get("instructions")
    if instructions is not None:
        want(instructions, str, "a string", "instructions")
    fields = {name: value for name, value in raw.items() if name not in ("input", "instructions")}
    fields["messages"] = messages_of(instructions, read_items(given, _refuse_reference))
    limit = fields.pop("max_output_tokens", None)
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    return {"max_tokens": limit, "reasoning_effort": effort, **fields}


def _refuse_reference(name: str) -> dict[str, Any]:
    raise InvalidRequest(f"input: chat completions keep no items, {shown(name)} is not here", "input")


def _told(item: Mapping[str, Any]) -> tuple[str, str | list[dict[str, Any]]]:
    """What a message or a compaction tells the model: role and content."""
    if item["type"] == COMPACTION:
        return "system", f"What was said before, in short:\n{summary_of(item)}"
    role = "user" if item["role"] == "user" else "system"
    if not any(_is_image(part) for part in item["content"]):
        return role, item["content"][0]["text"]
    return role, [
        _shown(part) if _is_image(part) else {"type": "text", "text": part["text"]} for part in item["content"]
    ]


def _shown(part: Mapping[str, Any]) -> dict[str, Any]:
    """An image as a part of chat completions."""
    found = {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
    return NamedPart(found, part.where) if isinstance(part, NamedPart) else found


def _flat(output: list[Any]) -> str:
    """The result of a tool in parts, which may be of any kind: texts, or JSON."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in output]
    return "\n".join(
        text if isinstance(text, str) else orjson.dumps(part).decode() for text, part in zip(texts, output, strict=True)
    )


def _extend(turn: dict[str, Any], item: Mapping[str, Any]) -> None:
    if item["type"] == "reasoning":
        thought = "".join(part["text"] for part in item["content"])
        if thought:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
    elif item["type"] == "function_call":
        _call(turn, item["call_id"], item)
    elif item["type"].endswith("_call"):
        name = item.get("name") if isinstance(item.get("name"), str) else item["type"].removesuffix("_call")
        arguments = {key: value for key, value in item.items() if key not in _NO_ARGUMENTS}
        _call(turn, item["call_id"], {"name": name, "arguments": orjson.dumps(arguments).decode()})
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


def error_text(error: Mapping[str, Any] | None) -> str:
    """An error of a call, for the model."""
    if error is None:
        return ""
    return f"Error: {error['message'] if 'message' in error else plain_text(error['content'])}"


def object_of(arguments: str) -> dict[str, Any] | None:
    """The object that ``arguments`` are the JSON of; None: they are not."""
    try:
        found = orjson.loads(arguments or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def plain_text(blocks: Any) -> str:
    """The text of a result's content. What a model cannot read is named."""
    texts: list[str] = []
    for block in blocks:
        held = block.get("resource")
        resource = held if isinstance(held, dict) else {}
        text = block.get("text", resource.get("text"))
        name = block.get("uri") or block.get("mimeType") or resource.get("mimeType") or block.get("type")
        texts.append(text if isinstance(text, str) else f"[{name}: not text]")
    return "\n".join(texts)
