"""The fields of the requests, with their types.

Ranges of sampling fields are core's to check (``SamplingParams.check``). Fields of several types are ``Any`` here and
read by hand, so that an error can name the element that is wrong. What the schemas say is the truth all the same:
docs/limits.md is made from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from fwk.types import Service
from fwk.types.request import MAX_DEADLINE
from fwk.types.sampling import (
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_GRAMMAR_LENGTH,
    MAX_N,
    MAX_PATTERN_LENGTH,
    MAX_PATTERN_SIZE,
    MAX_STOP_LENGTH,
    MAX_STOP_PATTERNS,
    MAX_TOKEN_IDS,
)
from fwk_server._common.caller import Caller
from fwk_server._common.fields import CONTEXT, STOP_STRINGS, RequestFields, bounded, ranged

MAX_LABEL = 256
MAX_SALT = 256
MAX_NAME = 512
MAX_PATH = 4_096
MAX_TEXT = 16 * 2**20
MAX_DETOKENIZED = 2**20
MAX_PROMPTS = 1_024
MAX_INPUTS = 2_048
MAX_MESSAGES = 2**14
MAX_TOOLS = 128
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024

TOKEN_ID: dict[str, Any] = {"type": "integer", "x-limit": "an id of the vocabulary"}
STRING: dict[str, Any] = {"type": "string", "x-limit": CONTEXT}
IDS: dict[str, Any] = {"type": "array", "items": TOKEN_ID, "x-limit": CONTEXT}


def array(items: dict[str, Any], most: int, **more: Any) -> dict[str, Any]:
    """The schema of an array."""
    return {"type": "array", "items": items, "maxItems": most, **more}


Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string", "maxLength": MAX_STOP_LENGTH}, STOP_STRINGS]})]
_PATTERN = {"type": "string", "maxLength": MAX_PATTERN_LENGTH}
Patterns = Annotated[Any, WithJsonSchema({"anyOf": [_PATTERN, array(_PATTERN, MAX_STOP_PATTERNS)]})]
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
Bias = Annotated[Any, WithJsonSchema({"type": "object", "additionalProperties": _BIAS, "maxProperties": MAX_TOKEN_IDS})]
MESSAGES = array({"type": "object", "x-limit": CONTEXT}, MAX_MESSAGES, minItems=1)
Messages = Annotated[Any, WithJsonSchema(MESSAGES)]
Prompt = Annotated[Any, WithJsonSchema({"anyOf": [STRING, IDS, array(STRING, MAX_PROMPTS), array(IDS, MAX_PROMPTS)]})]
Input = Annotated[Any, WithJsonSchema({"anyOf": [STRING, IDS, array(STRING, MAX_INPUTS), array(IDS, MAX_INPUTS)]})]
Words = Annotated[list[str], WithJsonSchema(array({"type": "string", "maxLength": MAX_STOP_LENGTH}, MAX_BAD_WORDS))]
Label = Annotated[str, Field(max_length=MAX_LABEL, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]


class Standing(RequestFields):
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


class StreamOptions(RequestFields):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_StreamOptions = Annotated[StreamOptions | None, WithJsonSchema(StreamOptions.model_json_schema())]


_GRAMMAR = f"a schema or grammar of {MAX_GRAMMAR_LENGTH} characters"
_Object = Annotated[Any, bounded("object", _GRAMMAR)]
_KINDS_OF_SCHEMA = [{"type": kind, "x-limit": _GRAMMAR} for kind in ("object", "string")]
_Schema = Annotated[Any, WithJsonSchema({"anyOf": _KINDS_OF_SCHEMA})]
_Grammar = Annotated[Any, bounded("string", _GRAMMAR)]
_Choice = Annotated[Any, bounded("array", _GRAMMAR, items={"type": "string", "x-limit": _GRAMMAR})]


class Repetition(RequestFields):
    """A text that says the same ``min_count`` times in a row ends."""

    max_pattern_size: Annotated[int, Field(ge=1, le=MAX_PATTERN_SIZE)]
    min_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)] | None = None
    min_count: Annotated[int, Field(ge=2, le=MAX_COUNT)]


_Repetition = Annotated[Repetition | None, WithJsonSchema(Repetition.model_json_schema())]


class GenerateRequest(Standing):
    """Fields that chat completions and completions share. None means "not given"."""

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    use_beam_search: bool | None = Field(None, description="vLLM's: best_of beams, of which n are returned.")
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    early_stopping: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["never"]}]})
    ] = None
    max_tokens: Annotated[int, ranged("max_tokens", CONTEXT)] | None = None
    min_tokens: Annotated[int, ranged("min_tokens", "max_tokens")] | None = None
    temperature: Annotated[float, ranged("temperature")] | None = None
    top_p: Annotated[float, ranged("top_p")] | None = None
    top_k: Annotated[int, ranged("top_k")] | None = None
    min_p: Annotated[float, ranged("min_p")] | None = None
    repetition_penalty: Annotated[float, ranged("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, ranged("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, ranged("frequency_penalty")] | None = None
    logit_bias: Bias = None
    allowed_token_ids: Annotated[list[int], bounded("array", "all of the vocabulary", items=TOKEN_ID)] | None = None
    bad_words: Words | None = None
    seed: Annotated[int, ranged("seed")] | None = None
    stop: Stop = None
    stop_regex: Patterns = Field(None, description="SGLang's: patterns that end the text as stop does.")
    stop_token_ids: Annotated[list[int], WithJsonSchema(array(TOKEN_ID, MAX_TOKEN_IDS))] | None = None
    repetition_detection: _Repetition = Field(None, description="vLLM's; sizes are numbers of tokens.")
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = Field(None, description="SGLang's name of include_stop_str_in_output.")
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, ranged("prompt_logprobs")] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), bounded("integer", CONTEXT, minimum=-1)] | None = Field(
        None, description="vLLM's: only the last tokens of the prompt; -1: as many as fit."
    )
    echo: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    lora_path: Annotated[str, Field(max_length=MAX_NAME)] | None = Field(
        None, description="The name of a loaded LoRA adapter, as SGLang takes it; model may name one as well."
    )
    request_id: Label | None = Field(
        None, description="The client's own name of the request: part of the reply's id, and for the server's logs."
    )
    rid: Label | None = Field(None, description="SGLang's name of request_id.")
    return_token_ids: bool | None = None
    return_hidden_states: bool | None = Field(
        None, description="SGLang's: the last token's, of a server started with --enable-return-hidden-states."
    )
    response_format: _Object = None
    structured_outputs: _Object = Field(None, description="vLLM's: json, regex, choice, grammar or json_object.")
    guided_json: _Schema = Field(None, description="vLLM's older names of the same.")
    guided_regex: _Grammar = None
    guided_choice: _Choice = None
    guided_grammar: _Grammar = None
    json_schema: _Schema = Field(None, description="SGLang's names of the same.")
    regex: _Grammar = None
    ebnf: _Grammar = None
    structural_tag: _Schema = Field(None, description="Free text with JSON after triggers.")
    guided_structural_tag: _Schema = None

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        return self.has_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerateRequest):
    """``POST /v1/completions``."""

    prompt: Prompt
    suffix: Annotated[str, bounded("string", CONTEXT)] | None = Field(
        None, description="What comes after the text that is wanted."
    )
    logprobs: Annotated[int, ranged("logprobs")] | None = None
    token_healing: bool | None = Field(
        None,
        description="LightLLM's: the prompt's last token is chosen again, so that the text may continue within it.",
    )


class EmbeddingRequest(Standing):
    """``POST /v1/embeddings``."""

    input: Input
    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, bounded("integer", "the model's own, or less of one made to be cut")] | None = None
    add_special_tokens: bool | None = None


_CHOICE_WORD = {"type": "string", "enum": ["none", "auto", "required"]}
_CHOICE_OBJECT = {"type": "object", "x-limit": "one of the tools"}


class ChatFields(RequestFields):
    """How messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[
            dict[str, Any],
            Field(max_length=MAX_TEMPLATE_KWARGS),
            bounded("object", f"{MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON", maxProperties=MAX_TEMPLATE_KWARGS),
        ]
        | None
    ) = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Given to the chat template; none turns thinking off where the template can, others on."
    )
    tools: Annotated[Any, WithJsonSchema(array({"type": "object", "x-limit": CONTEXT}, MAX_TOOLS))] = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [_CHOICE_WORD, _CHOICE_OBJECT]})] = None
    parallel_tool_calls: bool | None = None


class ChatRequest(ChatFields, GenerateRequest):
    """``POST /v1/chat/completions``."""

    max_completion_tokens: Annotated[int, ranged("max_tokens", CONTEXT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, ranged("logprobs")] | None = None
    include_reasoning: bool | None = Field(None, description="false: thinking is left out of the reply.")
    store: bool | None = Field(None, description="true: the reply is kept, to be listed and told again.")
    metadata: Annotated[Any, bounded("object", "16 pairs, of those that are kept")] = Field(
        None, description="What a stored reply is found by."
    )


class TokenizeRequest(ChatFields):
    """``POST /tokenize``: ``prompt`` or ``messages``."""

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    messages: Annotated[Any, WithJsonSchema({"anyOf": [MESSAGES, {"type": "null"}]})] = None
    prompt: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    content: Annotated[str, Field(max_length=MAX_TEXT)] | None = Field(
        None, description="llama.cpp's prompt: special tokens are added if add_special says so."
    )
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    """``POST /detokenize``."""

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    tokens: Annotated[list[int], WithJsonSchema(array(TOKEN_ID, MAX_DETOKENIZED))]


class LoadAdapterRequest(RequestFields):
    """``POST /v1/load_lora_adapter`` and ``/load_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    load_inplace: bool | None = Field(None, description="vLLM's; refused.")
    pinned: bool | None = Field(None, description="SGLang's; refused.")


class UnloadAdapterRequest(RequestFields):
    """``POST /v1/unload_lora_adapter`` and ``/unload_lora_adapter``."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
