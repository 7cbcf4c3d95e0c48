"""The fields of the requests, with their types.

Ranges of sampling fields are core's to check (``SamplingParams.check``). Fields of several types are ``Any`` here and
read by hand, so that an error can name the element that is wrong.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from fwk.types import Service
from fwk.types.request import MAX_DEADLINE
from fwk.types.sampling import MAX_N
from fwk_server._common.caller import Caller

MAX_LABEL = 256
MAX_SALT = 256
MAX_NAME = 512
MAX_PATH = 4_096

# A million wrong elements must not become a million errors.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]

Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})]
Bias = Annotated[Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1})]
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
Label = Annotated[str, Field(max_length=MAX_LABEL, pattern=r"^[^\x00-\x1f\x7f]*$")]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())


class Standing(_Fields):
    """Hints for the schedule policy, by which requests it may go; see docs/scheduling.md. Headers may give them too."""

    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    session_id: Annotated[str, Field(max_length=MAX_LABEL)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_LABEL)] | None = Field(
        None, description="OpenAI's; read as session_id when that is not given."
    )
    service_tier: Annotated[str, Field(max_length=MAX_LABEL)] | None = None
    deadline: Annotated[float, Field(gt=0, le=MAX_DEADLINE)] | None = Field(
        None, description="Seconds after arrival by which the first token is wanted."
    )

    def service(self, caller: Caller) -> Service:
        """These hints, and the headers' where the body has none."""
        session = self.prompt_cache_key if self.session_id is None else self.session_id
        return caller.served(session, self.service_tier, self.deadline)

    def urgency(self, caller: Caller) -> int:
        """The request's priority."""
        return caller.priority if self.priority is None else self.priority


class StreamOptions(_Fields):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_StreamOptions = Annotated[StreamOptions | None, WithJsonSchema(StreamOptions.model_json_schema())]


_Object = Annotated[Any, WithJsonSchema({"type": "object"})]


class GenerateRequest(Standing):
    """Fields that chat completions and completions share. None means "not given"."""

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = Field(None, description="SGLang's name of include_stop_str_in_output.")
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    lora_path: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="The name of a loaded LoRA adapter, as SGLang takes it; model may name one as well."
    )
    request_id: Label | None = Field(None, description="The client's own name of the request, for the server's logs.")
    rid: Label | None = Field(None, description="SGLang's name of request_id.")
    return_token_ids: bool | None = None
    response_format: _Object = None
    structured_outputs: _Object = Field(
        None, description="vLLM's: json, regex, choice, grammar or json_object. Its older guided_* are read as well."
    )

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        return self.has_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerateRequest):
    """``POST /v1/completions``."""

    prompt: Prompt
    logprobs: int | None = None


class EmbeddingRequest(Standing):
    """``POST /v1/embeddings``."""

    input: Prompt
    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None


class ChatFields(_Fields):
    """How messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatRequest(ChatFields, GenerateRequest):
    """``POST /v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = Field(None, description="false: thinking is left out of the reply.")


class TokenizeRequest(ChatFields):
    """``POST /tokenize``: ``prompt`` or ``messages``."""

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    messages: Messages = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Fields):
    """``POST /detokenize``."""

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    tokens: Ids


class LoadAdapterRequest(_Fields):
    """``POST /v1/load_lora_adapter`` and ``/load_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    load_inplace: bool | None = Field(None, description="vLLM's; refused.")
    pinned: bool | None = Field(None, description="SGLang's; refused.")


class UnloadAdapterRequest(_Fields):
    """``POST /v1/unload_lora_adapter`` and ``/unload_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
