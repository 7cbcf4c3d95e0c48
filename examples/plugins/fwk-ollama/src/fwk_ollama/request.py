"""From the body of a request to a checked ``GenerateInput``."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput
from fwk.types import GrammarRequest, SamplingParams

MAX_DEPTH = 64


class Sampling(BaseModel):
    """``options``: those of Ollama that fwk has too."""

    model_config = ConfigDict(extra="forbid")

    num_predict: int = Field(128, ge=-2, description="tokens to generate; negative: as many as fit")
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str = []
    repeat_penalty: float = 1.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_ctx: int | None = Field(None, ge=1, description="at most the model's context, which fwk always has")


class Common(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    stream: bool = True
    options: Sampling = Field(default_factory=Sampling)
    format: Literal["json", ""] | dict[str, Any] | None = None
    keep_alive: Any = None


class GenerateBody(Common):
    """POST /api/generate."""

    prompt: str = ""
    system: str = ""
    raw: bool = False


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(Common):
    """POST /api/chat."""

    messages: list[Message]


def read(kind: type[Common], data: bytes, frontend: Frontend) -> tuple[Any, GenerateInput]:
    """The body and what it asks for. Raises ``InvalidRequest``."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from None
    if body.options.num_ctx is not None and body.options.num_ctx > frontend.card.max_model_len:
        raise InvalidRequest(f"num_ctx: this server's context is {frontend.card.max_model_len}", "num_ctx")
    item = GenerateInput(_prompt(body, frontend), _sampling(body, frontend), operation="chat")
    return body, frontend.check(item)


def _prompt(body: Common, frontend: Frontend) -> list[int]:
    if isinstance(body, ChatBody):
        if not body.messages:
            raise InvalidRequest("messages: there is none", "messages")
        return frontend.text.chat_ids([message.model_dump() for message in body.messages])
    assert isinstance(body, GenerateBody)
    if body.raw:
        return frontend.text.encode(body.prompt)
    if not body.prompt:
        raise InvalidRequest("prompt: is empty", "prompt")
    system = [{"role": "system", "content": body.system}] if body.system else []
    return frontend.text.chat_ids([*system, {"role": "user", "content": body.prompt}])


def _sampling(body: Common, frontend: Frontend) -> SamplingParams:
    options = body.options
    return SamplingParams(
        max_tokens=options.num_predict if options.num_predict >= 0 else None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=[options.stop] if isinstance(options.stop, str) else options.stop,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        grammar=_grammar(body.format, frontend),
    )


def _grammar(format: Any, frontend: Frontend) -> GrammarRequest | None:
    if not format:
        return None
    request = GrammarRequest("json_object") if format == "json" else GrammarRequest("json_schema", json.dumps(format))
    if request.kind not in frontend.grammar_kinds:
        raise InvalidRequest("format: this server constrains no output", "format")
    return request
