"""From Ollama's bodies to OpenAI's chat fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import ModelCard
from fwk.types.sampling import MAX_LOGPROBS
from fwk_server._common.body import shown, want
from fwk_server._common.fields import CONTEXT, RequestFields, bounded

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "tfs_z", "seed", "stop"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
    *("presence_penalty", "frequency_penalty", "repeat_penalty", "repeat_last_n"),
)
_OPTIONS = {"num_predict": "max_tokens", **{name: name for name in _SAME}}

MAX_DURATION = 32

_Text = Annotated[str, bounded("string", CONTEXT)]
_Object = Annotated[dict[str, Any], bounded("object", CONTEXT)]
_Objects = Annotated[list[dict[str, Any]], bounded("array", CONTEXT, items={"type": "object", "x-limit": CONTEXT})]
_Texts = Annotated[list[str], bounded("array", CONTEXT, items={"type": "string", "x-limit": CONTEXT})]
_Seconds = Annotated[float, bounded("number", "any number: it says nothing here, where the model always stays")]
_Name = Annotated[str, bounded("string", "a served name")]


class _Fields(RequestFields):
    model: _Name | None = None


class _Body(_Fields):
    stream: bool | None = None
    options: _Object | None = None
    format: Annotated[str, bounded("string", "json")] | _Object | None = None
    think: bool | Annotated[str, bounded("string", "low, medium or high")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    keep_alive: _Seconds | Annotated[str, Field(max_length=MAX_DURATION)] | None = None


class ChatBody(_Body):
    """``POST /api/chat``."""

    messages: _Objects | None = None
    tools: _Objects | None = None


class GenerateBody(_Body):
    """``POST /api/generate``."""

    prompt: _Text | None = None
    system: _Text | None = None
    suffix: _Text | None = None
    raw: bool | None = None


class EmbedBody(_Fields):
    """``POST /api/embed`` and ``/api/embeddings``."""

    input: _Text | _Texts | None = None
    prompt: _Text | None = None


class ShowBody(_Fields):
    """``POST /api/show``."""


def served_name(raw: Mapping[str, Any], card: ModelCard) -> str:
    """The model's name without Ollama's tag for the newest."""
    name = want(raw.get("model") or raw.get("name") or "", str, "a string", "model")
    return card.name if name == f"{card.name}:latest" else name


def chat_fields(raw: Mapping[str, Any], card: ModelCard) -> dict[str, Any]:
    """``POST /api/chat``."""
    messages = want(raw.get("messages"), list, "an array of messages", "messages")
    fields = _common(raw, card) | {"messages": [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]}
    return fields | ({"tools": raw["tools"]} if raw.get("tools") else {})


def generate_fields(raw: Mapping[str, Any], card: ModelCard) -> dict[str, Any]:
    """``POST /api/generate``."""
    for name, reason in (
        ("context", "send the conversation to /api/chat"),
        ("template", "the model's own chat template is used"),
        ("suffix", "this server does not fill in the middle"),
    ):
        if raw.get(name):
            raise InvalidRequest(f"{name} is not supported: {reason}", name)
    system = [{"role": "system", "content": raw["system"]}] if raw.get("system") else []
    prompt = want(raw.get("prompt"), str, "a string", "prompt")
    if raw.get("images") and raw.get("raw"):
        raise InvalidRequest("images have no place in a raw prompt: leave raw out", "images")
    content = _with_images(raw["images"], prompt, "images") if raw.get("images") else prompt
    return _common(raw, card) | {"messages": [*system, {"role": "user", "content": content}]}


def is_load(raw: Mapping[str, Any]) -> bool:
    """Whether a request has nothing to answer: Ollama's clients load a model that way."""
    return not raw.get("messages") and not raw.get("prompt")


def _common(raw: Mapping[str, Any], card: ModelCard) -> dict[str, Any]:
    fields = {"model": served_name(raw, card), **_options(raw, card), **_format(raw.get("format"))}
    think = raw.get("think")
    if isinstance(think, bool):
        fields["chat_template_kwargs"] = {"enable_thinking": think, "thinking": think}
    elif think is not None:
        if think not in ("low", "medium", "high"):
            raise InvalidRequest("think must be true, false, 'low', 'medium' or 'high'", "think")
        fields["reasoning_effort"] = think
    return fields | {name: raw[name] for name in ("logprobs", "top_logprobs") if raw.get(name)}


def _options(raw: Mapping[str, Any], card: ModelCard) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    options = want(raw.get("options") or {}, dict, "an object", "options")
    for name, value in options.items():
        if name == "num_ctx":
            if want(value, int, "an integer", "options.num_ctx") > card.max_model_len:
                raise InvalidRequest(f"options.num_ctx: this server's context is {card.max_model_len}", "options")
        elif name not in _OPTIONS:
            raise InvalidRequest(f"options.{name[:128]} is not supported: the server's operator decides it", "options")
        elif name in _OPTIONS and value is not None and not (name == "num_predict" and value in (-1, -2)):
            fields[_OPTIONS[name]] = value
    return fields


def _format(kind: Any) -> dict[str, Any]:
    if kind == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(kind, dict) and kind:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": kind}}}
    if kind:
        raise InvalidRequest(f"format must be 'json' or a JSON schema, not {shown(kind)}", "format")
    return {}


def _message(message: Any, at: str) -> dict[str, Any]:
    message = dict(want(message, dict, "an object", at))
    if message.get("thinking"):
        message["reasoning_content"] = message.pop("thinking")
    if message.get("tool_name"):
        message["name"] = message.pop("tool_name")
    if message.get("content") is None:
        message["content"] = ""
    if images := message.pop("images", None):
        message["content"] = _with_images(images, message["content"], f"{at}.images")
    return message


def _with_images(images: Any, text: Any, at: str) -> list[dict[str, Any]]:
    """The parts of a content: files in base64, and the text after them."""
    files = [want(data, str, "base64", f"{at}[{i}]") for i, data in enumerate(want(images, list, "an array", at))]
    parts = [{"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}} for data in files]
    return [*parts, {"type": "text", "text": text}]
