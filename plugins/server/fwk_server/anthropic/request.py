"""From Anthropic's bodies to OpenAI's chat fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, WithJsonSchema

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown, validate, want
from fwk_server._common.chat.dialect import renamed
from fwk_server._common.chat.media import NamedPart
from fwk_server._common.chat.models import MAX_NAME
from fwk_server._common.fields import CONTEXT, STOP_STRINGS, RequestFields, bounded, ranged

_SAME = {name: name for name in ("model", "max_tokens", "temperature", "top_k", "top_p")} | {"stop_sequences": "stop"}
_REFUSED = ("container", "mcp_servers", "inference_geo")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_SEE_IMAGE = "The result is the image below."
"""What a tool's result says that is an image alone."""

_Objects = Annotated[list[dict[str, Any]], bounded("array", CONTEXT, items={"type": "object", "x-limit": CONTEXT})]
_System = Annotated[str, bounded("string", CONTEXT)] | _Objects
_Object = Annotated[dict[str, Any], bounded("object", CONTEXT)]


class CountBody(RequestFields):
    """``POST /v1/messages/count_tokens``."""

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    messages: _Objects
    system: _System | None = None
    tools: _Objects | None = None
    tool_choice: _Object | None = None
    thinking: _Object | None = None
    output_config: _Object | None = Field(None, description="effort, for the chat template, and format.")
    output_format: _Object | None = Field(None, description="The older name of output_config.format.")
    context_management: _Object | None = Field(None, description="Edits whose threshold is not reached.")


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, ranged("max_tokens", CONTEXT)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], WithJsonSchema(STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, ranged("top_k")] | None = None
    top_p: Annotated[float, ranged("top_p")] | None = None
    metadata: _Object | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def chat_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``POST /v1/messages``."""
    body = validate(MessagesBody, raw)
    fields = prompt_fields(raw) | renamed(raw, _SAME)
    if (body.metadata or {}).get("user_id") is not None:
        fields["user"] = want(raw["metadata"]["user_id"], str, "a string", "metadata.user_id")
    return fields


def prompt_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that decide the prompt."""
    for name in _REFUSED:
        if raw.get(name):
            raise InvalidRequest(f"{name} is not supported", name)
    body = validate(CountBody, raw)
    messages = _messages(body)
    fields: dict[str, Any] = {"messages": messages, **renamed(raw, {"model": "model"}), **_tools(raw)}
    if messages and messages[-1]["role"] == "assistant":  # the answer continues with it
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    thinking = (body.thinking or {}).get("type")
    if thinking not in (None, "enabled", "disabled", "adaptive"):
        raise InvalidRequest(f"thinking.type must be enabled, disabled or adaptive, not {shown(thinking)}", "thinking")
    if thinking is not None:
        fields["chat_template_kwargs"] = dict.fromkeys(("enable_thinking", "thinking"), thinking != "disabled")
    for name, value in _output(body).items():
        fields[name] = {**fields.get(name, {}), **value}
    budget = (body.thinking or {}).get("budget_tokens")
    if thinking == "enabled" and budget is not None:
        if type(budget) is not int or not 0 < budget < 2**31:
            raise InvalidRequest("thinking.budget_tokens must be a positive integer", "thinking")
        fields["thinking_token_budget"] = budget
    return fields


def _messages(body: CountBody) -> list[dict[str, Any]]:
    """OpenAI's messages: the system prompt and those of the turns, system messages in a row as one."""
    messages = [{"role": "system", "content": _text(body.system, "system")}] if body.system else []
    for i, turn in enumerate(body.messages):
        for message in _turn(want(turn, dict, "an object", f"messages[{i}]"), f"messages[{i}]"):
            if message["role"] == "system" and messages and messages[-1]["role"] == "system":
                message["content"] = f"{messages.pop()['content']}\n\n{message['content']}"
            messages.append(message)
    return messages


def _output(body: CountBody) -> dict[str, Any]:
    """The effort and the form of the answer."""
    config = body.output_config or {}
    for name in config:
        if name not in ("effort", "format"):
            raise InvalidRequest(f"output_config.{name[:64]} is not supported, only effort and format", "output_config")
    fields: dict[str, Any] = {}
    effort, form = config.get("effort"), config.get("format") or body.output_format
    if effort is not None:
        if effort not in _EFFORTS:
            raise InvalidRequest(f"output_config.effort must be one of {', '.join(_EFFORTS)}", "output_config")
        fields["chat_template_kwargs"] = {"reasoning_effort": effort}  # says nothing on whether to think
    if form is not None:
        where = "output_config.format" if config.get("format") else "output_format"
        if want(form, dict, "an object", where).get("type") != "json_schema":
            raise InvalidRequest(f"{where}.type must be json_schema, not {shown(form.get('type'))}", where)
        schema = want(form.get("schema"), dict, "a JSON schema", f"{where}.schema")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return fields


def _turn(turn: dict[str, Any], at: str) -> Iterator[dict[str, Any]]:
    """OpenAI's messages of one of Anthropic's: results of tools are messages of their own there.

    A system message amid the turns stays where it is, as one of OpenAI's does.
    """
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{at}.role must be 'user', 'assistant' or 'system', not {shown(role)}", "messages")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = want(content, list, "a string or an array of blocks", f"{at}.content")
    told = _Blocks()
    for j, block in enumerate(blocks):
        where = f"{at}.content[{j}]"
        told.add(role, want(block, dict, "an object", where), where)
    yield from told.results
    if role == "user" and (told.texts or told.images or not told.results):
        yield {"role": "user", "content": told.content()}
    elif role == "assistant":
        thoughts = {"reasoning_content": "".join(told.thoughts)} if told.thoughts else {}
        calls = {"tool_calls": told.calls} if told.calls else {}
        yield {"role": "assistant", "content": "".join(told.texts), **thoughts, **calls}
    elif role == "system":
        yield {"role": "system", "content": "".join(told.texts)}


class _Blocks:
    """The blocks of a message, by kind."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.images: list[tuple[int, dict[str, Any]]] = []  # and the number of texts before each
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []

    def add(self, role: str, block: Mapping[str, Any], at: str) -> None:
        """Take a block of a message of this role. Raises ``InvalidRequest`` for a kind that is not served."""
        kind = block.get("type")
        if kind == "text":
            self.texts.append(want(block.get("text"), str, "a string", f"{at}.text"))
        elif kind == "tool_result" and role == "user":
            called = want(block.get("tool_use_id"), str, "a string", f"{at}.tool_use_id")
            self.results.append(
                {"role": "tool", "tool_call_id": called, "content": self._result(block.get("content"), f"{at}.content")}
            )
        elif kind == "image" and role == "user":
            self.images.append((len(self.texts), _image(block, at)))
        elif kind == "document" and role == "user":
            self.texts.append(_document(block, at))
        elif kind == "tool_use" and role == "assistant":
            self.calls.append(_call(block, at))
        elif kind == "thinking" and role == "assistant":
            self.thoughts.append(want(block.get("thinking"), str, "a string", f"{at}.thinking"))
        elif kind != "redacted_thinking" or role != "assistant":
            raise InvalidRequest(f"{at}: a block of type {shown(kind)} is not supported here", "messages")

    def _result(self, content: Any, at: str) -> str:
        """What a tool returned. Its images stand in the user's message that follows: chat templates show none here."""
        if not isinstance(content, list):
            return _text(content or "", at)
        images = [(i, block) for i, block in enumerate(content) if isinstance(block, dict) and _is_image(block)]
        self.images += [(len(self.texts), _image(block, f"{at}[{i}]")) for i, block in images]
        text = _text([block for block in content if not (isinstance(block, dict) and _is_image(block))], at)
        return text or (_SEE_IMAGE if images else "")

    def content(self) -> str | list[dict[str, Any]]:
        """What the user said: a text, or parts in their order where there are images."""
        if not self.images:
            return "".join(self.texts)
        parts = [{"type": "text", "text": text} for text in self.texts]
        for before, image in reversed(self.images):
            parts.insert(before, image)
        return parts


def _is_image(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "image"


def _image(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    """An image as OpenAI's part."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise InvalidRequest(f"{at}: a block of type 'image' needs a source of type base64", "messages")
    name = "data" if kind == "base64" else "url"
    where = f"{at}.source.{name}"
    text = want(source.get(name), str, "a string", where)
    url = f"data:;base64,{text}" if kind == "base64" else text
    return NamedPart({"type": "image_url", "image_url": {"url": url}}, where)


def _call(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    name = want(block.get("name"), str, "a string", f"{at}.name")
    arguments = orjson.dumps(want(block.get("input") or {}, dict, "an object", f"{at}.input")).decode()
    called = want(block.get("id"), str, "a string", f"{at}.id")
    return {"id": called, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(value: Any, at: str) -> str:
    """A string, or the texts of an array of text blocks."""
    if isinstance(value, str):
        return value
    texts: list[str] = []
    for i, block in enumerate(want(value, list, "a string or an array of text blocks", at)):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise InvalidRequest(f"{at}[{i}] must be a text block: this server's model reads text only", at)
        texts.append(block["text"])
    return "".join(texts)


def _document(block: Mapping[str, Any], at: str) -> str:
    """A document that is text: behind its title and context, and with an empty line after it."""
    if want(block.get("citations") or {}, dict, "an object", f"{at}.citations").get("enabled"):
        raise InvalidRequest(f"{at}.citations: nothing is cited here", "messages")
    source = want(block.get("source"), dict, "an object", f"{at}.source")
    kind = source.get("type")
    if kind not in ("text", "content"):
        raise InvalidRequest(f"{at}: a document of type {shown(kind)} is not read here, only text", "messages")
    name = "data" if kind == "text" else "content"
    heads = [want(block[key], str, "a string", f"{at}.{key}") for key in ("title", "context") if block.get(key)]
    return "\n".join([*heads, _text(source.get(name), f"{at}.source.{name}")]) + "\n\n"


def _tools(raw: Mapping[str, Any]) -> dict[str, Any]:
    listed = raw.get("tools") or []
    choice = raw.get("tool_choice") or {}
    if not listed:
        if choice.get("type") in ("any", "tool"):
            raise InvalidRequest("tool_choice asks for a tool, but there are no tools", "tool_choice")
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed)]}
    kind = choice.get("type", "auto")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise InvalidRequest(f"tool_choice.type must be auto, any, tool or none, not {shown(kind)}", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: Any, at: str) -> dict[str, Any]:
    tool = want(tool, dict, "an object", at)
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(f"{at}: tools of type {shown(tool['type'])} are run by no one here", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}
