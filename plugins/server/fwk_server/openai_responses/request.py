"""From the body of ``POST /v1/responses`` to OpenAI's chat fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown, validate, want
from fwk_server._common.chat.dialect import renamed
from fwk_server._common.chat.items import messages_of
from fwk_server._common.chat.models import MAX_LABEL, MAX_NAME, MAX_TOOLS, ChatRequest, Label
from fwk_server._common.chat.other_names import is_read_elsewhere, want_model, warn_unknown
from fwk_server._common.fields import CONTEXT, RequestFields, bounded, ranged
from fwk_server._common.once import Once
from fwk_server.openai_responses.server_tools import ServerTools

MAX_ID = 128
MAX_CALLS = 32
"""Calls of tool servers in a response, where the request does not say."""
MAX_PAIRS = 16
MAX_KEY = 64
MAX_VALUE = 512

_SAME = {
    name: name
    for name in (
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "parallel_tool_calls",
        "prompt_cache_key",
        "service_tier",
        "user",
    )
} | {"max_output_tokens": "max_tokens"}

_CANNOT = {
    "prompt": "prompts are not kept here: send instructions and input",
    "moderation": "this server has no moderation",
    "image": "this route reads text only",
    "access_programs": "this server has no such programs",
    "background_options": "responses in the background begin as soon as there is room",
    "prompt_cache_options": "prompts are always cached; leave it out",
}
"""OpenAI's fields that ask for something that is not here."""

_Object = Annotated[dict[str, Any], bounded("object", CONTEXT)]
_Items = Annotated[list[Any], bounded("array", CONTEXT, items={"type": "object", "x-limit": CONTEXT})]
_Tools = Annotated[
    list[Any], bounded("array", "", items={"type": "object", "x-limit": CONTEXT}, maxItems=MAX_TOOLS), Field()
]
_Value = Annotated[str, Field(max_length=MAX_VALUE)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=MAX_KEY)], _Value], Field(max_length=MAX_PAIRS)]
SCORES = "message.output_text.logprobs"
_KnownInclude = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
_READ_IN = {"text": ("format", "verbosity"), "reasoning": ("effort", "summary", "generate_summary")}
_OFFERED = ("function", "mcp")


class ResponsesBody(RequestFields):
    """``POST /v1/responses``."""

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    input: Annotated[str, bounded("string", CONTEXT)] | _Items | None = Field(
        None, description="Needed, unless a response or a conversation continues."
    )
    instructions: Annotated[str, bounded("string", CONTEXT)] | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    conversation: Annotated[str, Field(max_length=MAX_ID)] | _Object | None = None
    stream: bool | None = None
    stream_options: _Object | None = None
    store: bool | None = None
    background: bool | None = None
    include: Annotated[list[_KnownInclude], Field(max_length=8)] | None = Field(
        None,
        description="Reasoning items hold their text in the clear, whether it is asked for or not; items of tools that "
        "OpenAI's service runs are not made here.",
    )
    top_logprobs: Annotated[int, ranged("logprobs")] | None = Field(
        None, description="Also asks for the log-probabilities that include may name."
    )
    max_output_tokens: Annotated[int, ranged("max_tokens", CONTEXT)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description=f"Of tools that the server runs itself, at most {MAX_CALLS} where it is not given."
    )
    parallel_tool_calls: bool | None = None
    tools: _Tools | None = None
    tool_choice: Annotated[str, Field(max_length=MAX_LABEL)] | _Object | None = None
    text: _Object | None = None
    reasoning: _Object | None = None
    temperature: Annotated[float, ranged("temperature")] | None = None
    top_p: Annotated[float, ranged("top_p")] | None = None
    top_k: Annotated[int, ranged("top_k")] | None = None
    min_p: Annotated[float, ranged("min_p")] | None = None
    repetition_penalty: Annotated[float, ranged("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, ranged("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, ranged("frequency_penalty")] | None = None
    seed: Annotated[int, ranged("seed")] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: (
        Annotated[list[Any], bounded("array", CONTEXT, items={"type": "object", "x-limit": CONTEXT})] | None
    ) = Field(None, description="A threshold of compaction that the prompt stays below.")
    client_metadata: _Object | None = Field(None, description="Not read.")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_LABEL)] | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None

    @property
    def conversation_id(self) -> str | None:
        """Of the conversation that the response belongs to."""
        found = self.conversation
        if isinstance(found, dict):
            found = want(found.get("id"), str, "a string", "conversation.id")
        return found

    @property
    def has_scores(self) -> bool:
        return bool(self.top_logprobs) or SCORES in (self.include or ())


def read(raw: Mapping[str, Any], once: Once, *, is_strict: bool = False) -> tuple[ResponsesBody, Mapping[str, Any]]:
    """The checked body, and the fields without the tools that are not offered to the model.

    Unknown fields and tools of other types are ignored, with a line in the log the first time; ``is_strict`` refuses
    them. Raises ``InvalidRequest``.
    """
    for name, value in raw.items():
        if name in _CANNOT and value:
            raise InvalidRequest(f"{name} is not supported: {_CANNOT[name]}", name)
        if name in ResponsesBody.model_fields or not value or name in _CANNOT:
            continue
        if is_read_elsewhere(name, ChatRequest):
            raise InvalidRequest(f"{name} is a field of /v1/chat/completions, not of /v1/responses", name)
        if is_strict:
            raise InvalidRequest(f"{shown(name)} is not a field of /v1/responses (--strict-requests)", name[:256])
    if is_strict:
        want_model(raw)
        for name, known in _READ_IN.items():
            _only(raw.get(name), known, name)
    else:
        warn_unknown(raw, [ResponsesBody], once)
        raw = _with_offered(raw, once)
    return validate(ResponsesBody, raw), raw


def _with_offered(raw: Mapping[str, Any], once: Once) -> Mapping[str, Any]:
    """The fields, of whose tools those stay that a model can be told of: the others run in OpenAI's service."""
    tools = raw.get("tools")
    if not isinstance(tools, list):
        return raw
    kinds = {tool["type"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("type"), str)}
    for kind in sorted(kinds.difference(_OFFERED)):
        line = f"tools of type {shown(kind)} are not offered to the model: /v1/responses knows {', '.join(_OFFERED)}"
        once.warn(f"tools {kind}", line)
    return {**raw, "tools": [tool for tool in tools if not _is_left_out(tool)]}


def _is_left_out(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] not in _OFFERED


def check_compaction(body: ResponsesBody, num_tokens: int) -> None:
    """Nothing is compacted by itself: raise ``InvalidRequest`` where a prompt is past a threshold."""
    for i, entry in enumerate(body.context_management or ()):
        at = f"context_management[{i}]"
        if want(entry, dict, "an object", at).get("type") != "compaction":
            raise InvalidRequest(f"{at}.type must be compaction, not {shown(entry.get('type'))}", "context_management")
        most = entry.get("compact_threshold")
        if most is not None and num_tokens > want(most, int, "an integer", f"{at}.compact_threshold"):
            raise InvalidRequest(
                f"{at}: the prompt has {num_tokens} tokens, more than compact_threshold: POST /v1/responses/compact "
                "makes a shorter conversation of it",
                "context_management",
            )


def chat_fields(
    body: ResponsesBody, raw: Mapping[str, Any], context: list[dict[str, Any]], tools: ServerTools
) -> dict[str, Any]:
    """The fields of a chat request over the items of the whole conversation; ``tools`` are those of tool servers."""
    scores = {"logprobs": True, "top_logprobs": body.top_logprobs or 0} if body.has_scores else {}
    return {
        "messages": messages_of(body.instructions, context),
        **scores,
        **renamed(raw, _SAME),
        **_format(body.text or {}),
        **_reasoning(body.reasoning or {}),
        **_tools(body, tools),
    }


def _format(text: Mapping[str, Any]) -> dict[str, Any]:
    wanted = want(text.get("format") or {"type": "text"}, dict, "an object", "text.format")
    kind = wanted.get("type")
    if text.get("verbosity") not in (None, "low", "medium", "high"):
        raise InvalidRequest("text.verbosity must be low, medium or high", "text.verbosity")
    if kind == "json_schema":
        want(wanted.get("name"), str, "a string", "text.format.name")
        want(wanted.get("schema"), dict, "a JSON schema", "text.format.schema")
        return {"response_format": {"type": kind, "json_schema": wanted}}
    if kind not in ("text", "json_object"):
        raise InvalidRequest(
            f"text.format.type must be text, json_object or json_schema, not {shown(kind)}", "text.format"
        )
    return {"response_format": {"type": kind}}


def _reasoning(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, "auto", "concise", "detailed"):
            raise InvalidRequest(f"reasoning.{name} must be auto, concise or detailed", f"reasoning.{name}")
    effort = reasoning.get("effort")
    if effort is None:
        return {}
    efforts = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    if effort not in efforts:
        raise InvalidRequest(f"reasoning.effort must be one of {', '.join(efforts)}", "reasoning.effort")
    return {"reasoning_effort": effort}


def _only(given: Any, names: tuple[str, ...], at: str) -> None:
    for name, value in given.items() if isinstance(given, dict) else ():
        if name not in names and value is not None:
            raise InvalidRequest(f"{at}.{name[:64]} is not supported, only {', '.join(names)}", at)


def later_choice(choice: Any) -> Any:
    """``tool_choice`` after a call was made: one that asks for a call has been kept, and may be kept again."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return {**choice, "mode": "auto"}
    return choice if choice == "none" else "auto"


def _tools(body: ResponsesBody, tools: ServerTools) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [found for i, tool in enumerate(body.tools) for found in _tool(tool, f"tools[{i}]", tools)]
    choice = body.tool_choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "function":
            [choice] = _named(choice, "tool_choice", tools)
        elif kind == "mcp":
            allowed = _named(choice, "tool_choice", tools)
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
        elif kind == "allowed_tools":
            listed = want(choice.get("tools"), list, "an array", "tool_choice.tools")
            allowed = [
                named for i, tool in enumerate(listed) for named in _named(tool, f"tool_choice.tools[{i}]", tools)
            ]
            choice = {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
        else:
            raise InvalidRequest(
                f"tool_choice.type must be function, mcp or allowed_tools, not {shown(kind)}", "tool_choice"
            )
    return fields if choice is None else fields | {"tool_choice": choice}


def _named(choice: Any, at: str, tools: ServerTools) -> list[dict[str, Any]]:
    if want(choice, dict, "an object", at).get("type") == "mcp":
        names = tools.chosen(choice, at)
    else:
        names = [want(choice.get("name"), str, "a string", f"{at}.name")]
        if choice.get("type") != "function":
            raise InvalidRequest(f"{at}.type must be function or mcp: nothing else is called here", at)
    return [{"type": "function", "function": {"name": name}} for name in names]


def _tool(tool: Any, at: str, tools: ServerTools) -> list[dict[str, Any]]:
    kind = want(tool, dict, "an object", at).get("type")
    if kind == "mcp":
        return tools.functions(tool["server_label"])
    if kind != "function":
        raise InvalidRequest(f"{at}: tools of type {shown(kind)} are run by no one here, only function, mcp", "tools")
    function: dict[str, Any] = {"name": want(tool.get("name"), str, "a string", f"{at}.name")}
    if tool.get("description") is not None:
        function["description"] = want(tool["description"], str, "a string", f"{at}.description")
    if tool.get("parameters") is not None:
        function["parameters"] = want(tool["parameters"], dict, "a JSON schema", f"{at}.parameters")
    if tool.get("strict") is True:
        function["strict"] = True
    return [{"type": "function", "function": function}]
