"""Fields under other servers' names: read as ours where they mean the same, refused by name where they cannot be had.

Together with the request models this covers the fields that OpenAI, vLLM, SGLang, llama.cpp and TGI
document. Only fields that none of them documents are ignored, and ``--strict-requests`` refuses those, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, lru_cache
from itertools import islice
from typing import Any

from pydantic import BaseModel

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown
from fwk_server._common.once import Once

# llama.cpp's, SGLang's, LightLLM's, Qwen's and transformers' names.
_SAME = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "grammar": "guided_grammar",
    "regular_constraint": "guided_regex",
    "stop_sequences": "stop",
    "thinking_budget": "thinking_token_budget",
    "thinking_budget_tokens": "thinking_token_budget",
    "reasoning_budget": "thinking_token_budget",
}

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Of which -1 is none, as LM Studio's examples and llama.cpp have it."""

_HINTS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
        "service_tier",
        "stream_options",
        "functions",
        "function_call",
        "reasoning",
        "input",
        "instructions",
        "max_output_tokens",
        "timings_per_token",
        "return_progress",
        "post_sampling_probs",
        "id_slot",
        "stream_interval",
        "extra_key",
        "priority",
        "session_params",
        "conversation_id",
    }
)
"""Documented fields that say nothing about the output's text, or that other code of ours reads."""

ROUTED_PREFILL = (
    "this server is neither a prefill nor a decode server (--disaggregation-mode prefill or decode), which a router's "
    "mode for these needs: give this one to a router without that mode"
)
_CANNOT = "this server's engine cannot do that"
_ZOO = "it needs a logits processor that is installed and switched on"
# With the value that asks for nothing, besides null, false, "", [] and {}.
_REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "json_object": ((), "response_format of type json_object does that here"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "input_embeds": ((), "prompts are text or token ids"),
    "return_routed_experts": ((), _CANNOT),
    "return_cached_tokens_details": ((), _CANNOT),
    "no_repeat_ngram_size": ((0,), _ZOO),
    "logits_processors": ((), "code in a request is never run; logits processors are plugins"),
    "data_parallel_rank": ((), "the load balancer chooses the engine"),
    "typical_p": ((1, 1.0), _ZOO),
    "mirostat": ((0,), _ZOO),
    "mirostat_mode": ((0,), _ZOO),
    "dry_multiplier": ((0,), _ZOO),
    "xtc_probability": ((0,), _ZOO),
    "dynatemp_range": ((0,), _ZOO),
    "top_n_sigma": ((-1, 0), _ZOO),
    "top_a": ((0,), _ZOO),
    "tfs_z": ((1, 1.0), _ZOO),
    "watermark": ((), _ZOO),
    "samplers": ((), "the order of the samplers is the server's choice"),
    "repeat_last_n": ((-1,), "repetition_penalty counts the whole text"),
    "penalize_nl": ((), "repetition_penalty counts every token alike"),
    "n_keep": ((0, -1), "prompts are not shifted: send a shorter one"),
    "n_indent": ((0,), _CANNOT),
    "t_max_predict_ms": ((0,), "limit max_tokens instead"),
    "n_probs": ((0,), "logprobs does that here"),
    "min_keep": ((0,), _CANNOT),
    "lora": ((), "name an adapter in model or lora_path"),
    "adapter_id": ((), "name an adapter in model or lora_path"),
    "image_data": ((), "images are image_url parts of messages, where the model takes any"),
    "video_data": ((), "videos are video_url parts of messages, where the model takes any"),
    "audio_data": ((), "sounds are input_audio parts of messages, where the model takes any"),
    "mm_processor_kwargs": ((), "--mm-processor-kwargs is for all requests"),
    "media_io_kwargs": ((), "images are decoded in one way"),
    "structural_tags": ((), "the field is structural_tag"),
    "guided_whitespace_pattern": ((), "whitespace is the server's choice: --constrained-json-whitespace-pattern"),
    "chat_template_content_format": ((), "contents are always given to the template as text"),
    "bad_words_ids": ((), "bad_words takes texts"),
    "input_extra": ((), "this route completes a prompt; /infill fills in the middle"),
}

_FINE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cache_prompt": (lambda value: value is True, "prompts are always cached; cache_salt keeps one to itself"),
    "detokenize": (lambda value: value is True, "replies always hold text; return_token_ids adds the ids"),
    "separate_reasoning": (lambda value: value is True, "the server decides that: --reasoning-parser"),
    "stream_reasoning": (lambda value: value is True, "thinking is always streamed"),
    "reasoning_format": (lambda value: value in ("auto", "deepseek"), "the server decides that: --reasoning-parser"),
    "parse_tool_calls": (lambda value: value is True, "leave tools out to get the text as it is"),
    "parallel_sample_num": (lambda value: value == 1, "n does that here"),
    "dynatemp_exponent": (lambda value: value == 1, _ZOO),
}


# Refused whenever they say anything: null, false, "", 0, [] and {} ask for nothing.
_NOT_DONE = {
    "audio": "this server generates text only",
    "moderation": "this server has no moderation",
    "web_search_options": "this server has no web search",
    "token_healing": "chat prompts end where a message does; /v1/completions heals",
    "return_hidden_states": "hidden states are for chat completions, completions and SGLang's /generate",
    "suffix": "chat answers; /v1/completions fills in the middle",
    "guided_decoding_backend": "the grammar backend is the server's choice (--grammar-backend)",
    "chat_template": "the model's own chat template is used; a request cannot bring one",
    "documents": "documents are not supported: put their text into a message",
    "truncate_prompt_tokens": "inputs are not truncated: send a shorter one",
    "logprob_token_ids": "logprob_token_ids is not supported",
    "return_tokens_as_token_ids": "return_tokens_as_token_ids is not supported; return_token_ids is",
    "return_prompt_text": "return_prompt_text is not supported; echo is",
    "thinking_token_budget": "thinking can be limited in chat completions, by the logits processor thinking_budget",
    "lora_path": "LoRA adapters are for chat completions and completions",
    "kv_transfer_params": ROUTED_PREFILL,
    "bootstrap_host": ROUTED_PREFILL,
    "bootstrap_port": ROUTED_PREFILL,
    "bootstrap_room": ROUTED_PREFILL,
    "vllm_xargs": "vllm_xargs is not supported: logits processors declare their own fields",
    "custom_params": "custom_params is not supported: logits processors declare their own fields",
    "custom_logit_processor": "code in a request is never run",
}


_STRUCTURED = {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf"}
"""Fields by which other routes constrain their output, and ``response_format``, which models have."""


def _is_text_only(value: Any) -> bool:
    return value in ([], ["text"])


# Fine with one value, refused with any other.
_ONLY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "modalities": (_is_text_only, "this server generates text only: modalities must be ['text']"),
    "spaces_between_special_tokens": (lambda value: value is True, "special tokens are always spaced by the tokeniser"),
}


def in_our_names(raw: Mapping[str, Any], processors: Sequence[type[BaseModel]] = ()) -> Mapping[str, Any]:
    """``raw`` with other servers' names replaced. Raises ``InvalidRequest`` for what is documented and not done."""
    read = fields_of(processors)
    for name in raw.keys() & _REFUSED.keys() - read:
        neutral, reason = _REFUSED[name]
        if raw[name] and raw[name] not in neutral:
            raise InvalidRequest(f"{name} is not supported: {reason}", name)
    for name in raw.keys() & _FINE.keys() - read:
        is_fine, reason = _FINE[name]
        if raw[name] is not None and not is_fine(raw[name]):
            raise InvalidRequest(f"{name} cannot be {shown(raw[name])}: {reason}", name)
    given = {name: _SAME[name] for name in raw.keys() & _SAME.keys() if raw[name] is not None}
    unset = [name for name in _LIMITS if raw.get(name) == -1]
    if not given and not unset:
        return raw
    renamed = {name: value for name, value in raw.items() if name not in given and name not in unset}
    for name, ours in given.items():
        if renamed.get(ours) is not None:
            raise InvalidRequest(f"{name} and {ours} mean the same: give one", name)
        if not (ours in ("max_tokens", "thinking_token_budget") and raw[name] == -1):  # llama.cpp: without a limit
            renamed[ours] = raw[name]
    return renamed


def refuse_unsupported(raw: Mapping[str, Any], reads: Collection[str] = ()) -> None:
    """Raise for the first field of a request that this server would have to ignore; the route ``reads`` some."""
    for name in raw.keys() & _NOT_DONE.keys() - set(reads):
        if raw[name]:
            raise InvalidRequest(f"{name}: {_NOT_DONE[name]}", name)
    for name in raw.keys() & _ONLY.keys():
        is_fine, sentence = _ONLY[name]
        if raw[name] is not None and not is_fine(raw[name]):
            raise InvalidRequest(sentence, name)


def fields_of(models: Sequence[type[BaseModel]]) -> set[str]:
    """The names that models read."""
    return {field.alias or name for model in models for name, field in model.model_fields.items()}


def asks_elsewhere(name: str, value: Any, model: type[BaseModel]) -> bool:
    """Whether a field is one of ``model`` or of other servers, and its value asks for something."""
    if name in _HINTS or name in ("model", "stream") or not value or (name == "n" and value == 1):
        return False
    neutral = _REFUSED.get(name, ((), ""))[0]
    is_fine = _FINE.get(name, _ONLY.get(name, (lambda value: False, "")))[0]
    is_default = value is True and name in ("skip_special_tokens", "add_special_tokens")
    return name in _that_ask(model) and value not in neutral and not is_fine(value) and not is_default


@cache
def _that_ask(model: type[BaseModel]) -> frozenset[str]:
    documented = (_SAME, _REFUSED, _FINE, _NOT_DONE, _ONLY, _STRUCTURED)
    return frozenset(fields_of([model])).union(*documented)


def refuse_unknown(raw: Mapping[str, Any], models: Sequence[type[BaseModel]], where: str = "--strict-requests") -> None:
    """Raise for a field that is neither read nor documented anywhere, because of ``where``."""
    known = _known(models)
    for name in raw:
        if name not in known:
            near = get_close_matches(name[:MAX_NAME], known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidRequest(f"the field {shown(name)} is unknown ({where}){hint}", name[:256])


def want_model(raw: Mapping[str, Any]) -> None:
    """Raise where ``--strict-requests`` wants a model to be named, as OpenAI's API does."""
    if raw.get("model") is None:
        raise InvalidRequest("model is missing (--strict-requests)", "model")


def is_read_elsewhere(name: str, model: type[BaseModel]) -> bool:
    """Whether a field that is no hint is one of ``model``, or of other servers."""
    return name in _known([model]) and name not in _HINTS


def warn_unknown(raw: Mapping[str, Any], models: Sequence[type[BaseModel]], once: Once) -> None:
    """Log, the first time, each unknown field that is near a known one: a typing error, most likely.

    Other unknown fields are those of servers that came later, and are ignored without a word.
    """
    for name in islice(raw.keys() - _known(models), MAX_COMPARED):
        near = _nearest(name[:MAX_NAME], tuple(models))
        if near is not None:
            line = f"the field {shown(name)} of a request is unknown and ignored; did its client mean {near}?"
            once.warn(f"field {name[:MAX_NAME]}", line)


@lru_cache(256)
def _nearest(name: str, models: tuple[type[BaseModel], ...]) -> str | None:
    """The known field that is written most like it. Looking takes milliseconds, so that what was found is kept."""
    return next(iter(get_close_matches(name, _all_names(models), 1, _NEAR)), None)


def _known(models: Sequence[type[BaseModel]]) -> frozenset[str]:
    return _all_names(tuple(models))


@cache
def _all_names(models: tuple[type[BaseModel], ...]) -> frozenset[str]:
    return _EVERYWHERE | fields_of(models)


MAX_COMPARED = 16
"""Unknown fields of a request that are compared with those that are known, which takes milliseconds each."""

MAX_NAME = 64
"""Characters of a field's name that are looked at."""

_NEAR = 0.75
"""Likeness of two names from which on one may be meant by the other, of ``difflib``."""

_EVERYWHERE = frozenset({*_SAME, *_REFUSED, *_FINE, *_HINTS, *_NOT_DONE, *_ONLY})
"""Fields that some server documents, whatever they do here."""
