"""The replies, as /openapi.json documents them."""

from __future__ import annotations

from typing import Any, Literal

from fwk_server._common.documented import Reply


class ErrorDetail(Reply):
    """What went wrong; ``param`` names the field."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(Reply):
    """Every error."""

    error: ErrorDetail


class UsageBody(Reply):
    """Tokens, counted."""

    prompt_tokens: int
    total_tokens: int


class Message(Reply):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatBody(Reply):
    """The reply of /v1/chat/completions; a stream's events are its chunks."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class RenderedBody(Reply):
    """What a request's prompt is, in token ids."""

    request_id: str
    token_ids: list[int]
    features: None
    cache_salt: str | None
    model: str | None


class CompletionChoice(Reply):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CompletionBody(Reply):
    """The reply of /v1/completions; a stream's events are its chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class Embedding(Reply):
    """The vector of one input: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsBody(Reply):
    """The reply of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: UsageBody


class ModelBody(Reply):
    """The served model or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsBody(Reply):
    """The reply of /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]


class VersionBody(Reply):
    """The reply of /version."""

    version: str


class TokenizerInfoBody(Reply):
    """The reply of /tokenizer_info."""

    tokenizer_class: str | None
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None


class TokenizeBody(Reply):
    """The reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeBody(Reply):
    """The reply of /detokenize."""

    prompt: str


class AdaptersBody(Reply):
    """The adapters that are loaded, after one was loaded or unloaded."""

    success: bool
    loaded_adapters: dict[str, str]
