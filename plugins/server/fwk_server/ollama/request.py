"""From Ollama's bodies to OpenAI's chat fields."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import Field

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, ModelCard
from fwk.types.sampling import MAX_LOGPROBS
from fwk_server._common.body import shown, want
from fwk_server._common.chat.media import NamedPart
from fwk_server._common.chat.other_names import fields_of
from fwk_server._common.fields import CONTEXT, RequestFields, bounded
from fwk_server._common.once import Once

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repeat_penalty"),
)
_OPTIONS = {"num_predict": "max_tokens", **{name: name for name in _SAME}}
_PROCESSORS = ("typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta", "repeat_last_n")
"""Options that only a logits processor reads, where one is installed and on."""
_INTEGERS = ("num_predict", "top_k", "seed", "num_ctx", "mirostat", "repeat_last_n")
_LOADING = (
    *("num_thread", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "numa", "num_batch", "low_vram", "f16_kv"),
    *("logits_all", "vocab_only", "embedding_only", "num_gqa", "rope_frequency_base", "rope_frequency_scale"),
)
"""Options about how a model is loaded, which the operator has decided."""
_OTHERS = ("num_keep", "penalize_newline", "draft_num_predict")
"""Options that have nothing to act on here."""

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
    suffix: _Text | None = Field(None, description="What comes after the text that is wanted.")
    raw: bool | None = None


class EmbedBody(_Fields):
    """``POST /api/embed`` and ``/api/embeddings``."""

    input: _Text | _Texts | None = None
    prompt: _Text | None = None
    truncate: bool | None = Field(None, description="false: inputs that are too long are refused, not cut.")
    dimensions: Annotated[int, bounded("integer", "the model's own, or less of one made to be cut")] | None = None


class ShowBody(_Fields):
    """``POST /api/show``."""


class PullBody(_Fields):
    """``POST /api/pull``."""

    stream: bool | None = None


MAX_OPTIONS = 256
"""Of a request: several times as many as there are."""


def served_name(raw: Mapping[str, Any], card: ModelCard) -> str:
    """The model's name without Ollama's tag for the newest."""
    name = want(raw.get("model") or raw.get("name") or "", str, "a string", "model")
    bare = name.removesuffix(":latest")
    return bare if card.is_called(bare) else name


def chat_fields(raw: Mapping[str, Any], frontend: Frontend, once: Once) -> dict[str, Any]:
    """``POST /api/chat``."""
    messages = want(raw.get("messages"), list, "an array of messages", "messages")
    fields = _common(raw, frontend, once)
    fields |= {"messages": [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]}
    return fields | ({"tools": raw["tools"]} if raw.get("tools") else {})


def generate_fields(raw: Mapping[str, Any], frontend: Frontend, once: Once) -> dict[str, Any]:
    """``POST /api/generate``."""
    for name, reason in (
        ("context", "send the conversation to /api/chat"),
        ("template", "the model's own chat template is used"),
    ):
        if raw.get(name):
            raise InvalidRequest(f"{name} is not supported: {reason}", name)
    system = [{"role": "system", "content": raw["system"]}] if raw.get("system") else []
    prompt = want(raw.get("prompt"), str, "a string", "prompt")
    if raw.get("images") and raw.get("raw"):
        raise InvalidRequest("images have no place in a raw prompt: leave raw out", "images")
    content = _with_images(raw["images"], prompt, "images") if raw.get("images") else prompt
    return _common(raw, frontend, once) | {"messages": [*system, {"role": "user", "content": content}]}


def is_load(raw: Mapping[str, Any]) -> bool:
    """Whether a request has nothing to answer: Ollama's clients load a model that way."""
    return not raw.get("messages") and not raw.get("prompt")


def is_unload(raw: Mapping[str, Any]) -> bool:
    """Whether a request asks for a model to be unloaded: ``keep_alive`` is 0, which Go's clients write as ``0s``."""
    kept = raw.get("keep_alive")
    return ("0" in kept and not any(digit in kept for digit in "123456789")) if isinstance(kept, str) else kept == 0


def _common(raw: Mapping[str, Any], frontend: Frontend, once: Once) -> dict[str, Any]:
    fields = {"model": served_name(raw, frontend.card), **_options(raw, frontend, once), **_format(raw.get("format"))}
    think = raw.get("think")
    if isinstance(think, bool):
        fields["chat_template_kwargs"] = {"enable_thinking": think, "thinking": think}
    elif think is not None:
        if think not in ("low", "medium", "high"):
            raise InvalidRequest("think must be true, false, 'low', 'medium' or 'high'", "think")
        fields["reasoning_effort"] = think
    return fields | {name: raw[name] for name in ("logprobs", "top_logprobs") if raw.get(name)}


def _options(raw: Mapping[str, Any], frontend: Frontend, once: Once) -> dict[str, Any]:
    """The options that say something here. Others are ignored as Ollama ignores them, and the log says so."""
    read = fields_of(frontend.processor_params)
    fields: dict[str, Any] = {}
    options = want(raw.get("options") or {}, dict, "an object", "options")
    if len(options) > MAX_OPTIONS:
        raise InvalidRequest(f"options holds {len(options)} members; at most {MAX_OPTIONS} are known", "options")
    for name, value in options.items():
        if value is None:
            continue
        if name in _INTEGERS:  # Go reads every number of JSON as a float, so clients send 40.0, too
            value = want(_whole(value), int, "an integer", f"options.{name}")
        if name == "num_ctx":
            most = frontend.card.max_model_len
            if value > most:
                once.warn(name, f"options.num_ctx: {value} is more than this server's context, so {most} holds")
        elif name in read or (name in _OPTIONS and not (name == "num_predict" and value <= 0)):
            fields[_OPTIONS.get(name, name)] = value
        elif name not in _OPTIONS:
            once.warn(name, f"options.{shown(name)[1:-1]} is ignored: {_reason(name)}")
    return fields


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _reason(name: str) -> str:
    """Why an option says nothing here."""
    if name in _LOADING:
        return "how the model is loaded is the operator's to decide"
    if name in _PROCESSORS:
        return "no logits processor that reads it is on"
    if name in _OTHERS:
        return "it has nothing to act on here"
    near = get_close_matches(name[:64], [*_OPTIONS, "num_ctx", *_PROCESSORS], 1)
    return "it is unknown" + (f"; did you mean {near[0]}?" if near else "")


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
    parts = [
        NamedPart({"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}, f"{at}[{i}]")
        for i, data in enumerate(files)
    ]
    return [*parts, {"type": "text", "text": text}]
