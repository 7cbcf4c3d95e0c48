"""Chat messages: checked, flattened to what chat templates read, and rendered to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import TextTools
from fwk_server._common.body import MAX_DEPTH, is_too_deep, shown, want
from fwk_server._common.chat.media import MediaParts
from fwk_server._common.chat.models import MAX_MESSAGES, MAX_TEMPLATE_KWARGS_BYTES, ChatFields

ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Roles taken, and the name templates know them by."""

_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the switch of their thinking: Qwen3 and GLM the first, DeepSeek, Granite and Kimi the second."""

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What a message's thinking is called: as templates read it, and by other servers."""

_OTHER_PARTS = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
"""Parts of ``/v1/responses``, which editors also send here, and the same of chat completions."""

# What render_chat passes itself, and what would change how a template is found or run.
_OUR_ARGUMENTS = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer",
        "return_dict",
        "return_tensors",
        "truncation",
        "padding",
        "max_length",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
        "self",
        "kwargs",
    }
)


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tool was called, or answered."""
    return any("tool_calls" in message or message["role"] == "tool" for message in messages)


def chat_ids(
    text: TextTools,
    body: ChatFields,
    messages: list[dict[str, Any]],
    add_special_tokens: bool,
    tools: list[dict[str, Any]] | None = None,
    max_num_tokens: int | None = None,
) -> list[int]:
    """Render messages and tokenise. Templates write their own special tokens, so none are added by default.

    What is sure to have more than ``max_num_tokens`` is refused before it is tokenised.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other: the one continues with the last "
            "message, the other opens a new one",
            "continue_final_message",
        )
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    kwargs = template_kwargs(body)
    return text.chat_ids(
        messages,
        tools=tools,
        add_generation_prompt=adds,
        continue_final_message=continues,
        kwargs=kwargs,
        add_special_tokens=add_special_tokens,
        max_num_tokens=max_num_tokens,
    )


def template_kwargs(body: ChatFields) -> dict[str, Any] | None:
    """Variables a client sets in the template; never those that the server sets."""
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name in _OUR_ARGUMENTS or name.startswith("_"):
            raise InvalidRequest(f"chat_template_kwargs may not set {shown(name)}", "chat_template_kwargs")
    effort = body.reasoning_effort
    if effort is not None:
        if not kwargs.keys() & _SWITCHES:
            kwargs |= dict.fromkeys(_SWITCHES, effort != "none")
        if effort != "none":
            kwargs.setdefault("reasoning_effort", effort)
    if kwargs and len(orjson.dumps(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequest(
            f"chat_template_kwargs holds more than {MAX_TEMPLATE_KWARGS_BYTES} bytes", "chat_template_kwargs"
        )
    return kwargs or None


def read_messages(value: Any, media: MediaParts) -> list[dict[str, Any]]:
    """Check ``messages``; ``developer`` becomes ``system``, contents texts, or lists of parts where there are media."""
    if not want(value, list, "an array of messages", "messages"):
        raise InvalidRequest("messages must not be empty", "messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"there are {len(value)} messages; at most {MAX_MESSAGES} are allowed", "messages")
    messages = [_message(item, f"messages[{i}]", media) for i, item in enumerate(value)]
    _check_results(messages)
    return messages


def _check_results(messages: list[dict[str, Any]]) -> None:
    """Every result of a tool belongs to a call before it; ids are compared where both have one."""
    ids: set[str | None] = set()
    for i, message in enumerate(messages):
        ids.update(call["id"] if isinstance(call["id"], str) else None for call in message.get("tool_calls", ()))
        if message["role"] != "tool":
            continue
        if not ids:
            where = f"messages[{i}]"
            raise InvalidRequest(f"{where} is a tool's result, but no message before it calls a tool", where)
        wanted = message.get("tool_call_id")
        if wanted is not None and wanted not in ids and None not in ids:
            where = f"messages[{i}].tool_call_id"
            raise InvalidRequest(f"{where}: no message before it makes the call {shown(wanted)}", where)


def _message(item: Any, at: str, media: MediaParts) -> dict[str, Any]:
    want(item, dict, "an object", at)
    role = want(item.get("role"), str, "a string", f"{at}.role")
    if role not in ROLES:
        raise InvalidRequest(f"{at}.role must be one of {', '.join(ROLES)}, not {shown(role)}", f"{at}.role")
    calls = _calls(item) if role == "assistant" else None
    message: dict[str, Any] = {"role": ROLES[role], "content": _content(item, role, bool(calls), at, media)}
    for name in ("name", "tool_call_id", *_THOUGHTS):
        if item.get(name) is not None:
            ours = _THOUGHTS[0] if name in _THOUGHTS else name
            message.setdefault(ours, want(item[name], str, "a string", f"{at}.{name}"))
    if _THOUGHTS[0] in message and not (calls and message["content"]):
        message["thinking"] = message[_THOUGHTS[0]]  # as gpt-oss reads it, which refuses it beside content and calls
    if calls:
        message["tool_calls"] = [
            _tool_call(call, f"{at}.tool_calls[{i}]")
            for i, call in enumerate(want(calls, list, "an array", f"{at}.tool_calls"))
        ]
    return message


def _calls(item: Mapping[str, Any]) -> Any:
    """The calls of an assistant's turn; the one of ``function_call``, OpenAI's old name, where there are none."""
    if item.get("tool_calls") is None and item.get("function_call"):
        return [{"function": item["function_call"]}]
    return item.get("tool_calls")


def _content(
    item: Mapping[str, Any], role: str, has_calls: bool, at: str, media: MediaParts
) -> str | list[dict[str, Any]]:
    content = item.get("content")
    if isinstance(content, str):
        return content
    where = f"{at}.content"
    if content is None:
        if role == "assistant" and (has_calls or item.get("refusal") is not None):
            return item["refusal"] if isinstance(item.get("refusal"), str) else ""
        raise InvalidRequest(f"{where} is missing", where)
    want(content, list, "a string or an array of parts", where)
    parts = [_part(part, role, f"{where}[{i}]", media) for i, part in enumerate(content)]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The text of a content, without its media."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _part(part: Any, role: str, at: str, media: MediaParts) -> Any:
    if isinstance(part, str):
        return part
    want(part, dict, "an object", at)
    given: str = want(part.get("type"), str, "a string", f"{at}.type")
    kind = _OTHER_PARTS.get(given, given)
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        return want(part.get(kind), str, "a string", f"{at}.{kind}")
    found = media.read(part, kind, role, at)
    if found is not None:
        return found
    raise InvalidRequest(f"{at}.type must be 'text', not {shown(kind)}", f"{at}.type")


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    """A call as templates read it: ``arguments`` an object, where the API has its JSON."""
    want(call, dict, "an object", at)
    function = want(call.get("function"), dict, "an object", f"{at}.function")
    name = want(function.get("name"), str, "a string", f"{at}.function.name")
    where = f"{at}.function.arguments"
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"{where} is not valid JSON", where) from None
    want(arguments, dict, "an object, as JSON", where)
    if is_too_deep(arguments):
        raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} levels deep", where)
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}
