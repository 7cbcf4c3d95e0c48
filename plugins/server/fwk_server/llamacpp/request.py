"""From llama.cpp's fields to those of a completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, Infill
from fwk.types.sampling import MAX_TOKEN_IDS
from fwk_server._common import completion
from fwk_server._common.body import shown, validate, want
from fwk_server._common.caller import Caller
from fwk_server._common.chat.models import (
    IDS,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PROMPTS,
    STRING,
    TOKEN_ID,
    ChatFields,
    GenerateRequest,
    array,
)
from fwk_server._common.completion import CompletionCall
from fwk_server._common.fields import CONTEXT, bounded, ranged

MAX_FILES = 256
MAX_FIELDS = 64
MAX_MS = 86_400_000
MAX_SAMPLERS = 32

# Of each sampler that may be left out: its fields, at the values at which it does nothing.
_OFF: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": -1},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "typ_p": {"typical_p": None},
    "xtc": {"xtc_probability": None},
    "dry": {"dry_multiplier": None},
    "top_n_sigma": {"top_n_sigma": None},
    "infill": {},
}

_MIXED = {"type": "array", "items": {"anyOf": [STRING, TOKEN_ID]}, "x-limit": CONTEXT}
_NAMES = {"logprobs": "n_probs", "repetition_penalty": "repeat_penalty", "max_tokens": "n_predict"}
_ELSEWHERE = {
    "return_hidden_states": "/v1/completions and /generate",
    "stream_options": "/v1/completions: a stream ends with all counts here",
}
_OURS = ("prompt", "return_tokens", "stream", "samplers", "response_fields", "t_max_predict_ms")

Prompt = Annotated[Any, WithJsonSchema({"anyOf": [STRING, IDS, _MIXED, array(STRING, MAX_PROMPTS)]})]
_NUMBER = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_PAIR = {"type": "array", "x-limit": "a token or a text, and a number or false"}
Bias = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": _NUMBER, "maxProperties": MAX_TOKEN_IDS},
                array(_PAIR, MAX_TOKEN_IDS),
            ]
        }
    ),
]


class Common(GenerateRequest):
    """Fields of both routes under llama.cpp's names; those of ``/v1/completions`` are read as well."""

    n_predict: Annotated[int, bounded("integer", CONTEXT, minimum=-1)] | None = Field(None, description="-1: no limit.")
    n_probs: Annotated[int, ranged("logprobs")] | None = None
    repeat_penalty: Annotated[float, ranged("repetition_penalty")] | None = None
    grammar: Annotated[Any, bounded("string", "a grammar")] = None
    logit_bias: Bias = None
    return_tokens: bool | None = None
    samplers: Annotated[Any, WithJsonSchema(array({"type": "string", "x-limit": "a name"}, MAX_SAMPLERS))] = Field(
        None, description="Which samplers there are; their order is the server's."
    )
    response_fields: Annotated[Any, WithJsonSchema(array({"type": "string", "maxLength": MAX_NAME}, MAX_FIELDS))] = None
    t_max_predict_ms: Annotated[int, Field(ge=0, le=MAX_MS)] | None = Field(
        None, description="No new token after so many milliseconds of them, once there is a whole line."
    )


class CompletionBody(Common):
    """``POST /completion``."""

    prompt: Prompt


class InfillBody(Common):
    """``POST /infill``."""

    input_prefix: Annotated[str, bounded("string", CONTEXT)]
    input_suffix: Annotated[str, bounded("string", CONTEXT)]
    input_extra: Annotated[Any, WithJsonSchema(array({"type": "object", "x-limit": CONTEXT}, MAX_FILES))] = None
    prompt: Annotated[str, bounded("string", CONTEXT)] | None = Field(
        None, description="How the middle begins, such as the line up to the cursor."
    )


class TemplateBody(ChatFields):
    """``POST /apply-template``."""

    messages: Annotated[Any, WithJsonSchema(array({"type": "object", "x-limit": CONTEXT}, MAX_MESSAGES))]


@dataclass(slots=True)
class LlamaCall:
    """A completion, and what llama.cpp's clients may say of how it is told."""

    call: CompletionCall
    returns_tokens: bool
    returned: list[str]  # fields of the reply; empty: all
    max_seconds: float  # of new tokens, once there is a whole line; 0: any
    is_prompt_only: bool  # the prompt is computed, for the cache


def read_completion(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> LlamaCall:
    """A call of ``/completion``, checked."""
    if "prompt" not in raw:
        raise InvalidRequest("prompt is required", "prompt")
    return _read(raw, _prompt(raw["prompt"], frontend), frontend, caller)


def read_infill(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> LlamaCall:
    """A call of ``/infill``, checked."""
    frontend.card.check_task("generate")
    for name in ("input_prefix", "input_suffix"):
        if name not in raw:
            raise InvalidRequest(f"{name} is required", name)
    parts = {name: want(raw.get(name) or "", str, "a string", name) for name in ("input_prefix", "input_suffix")}
    start = want(raw.get("prompt") or "", str, "a string", "prompt")
    files = _files(raw.get("input_extra") or [])
    texts = [*parts.items(), ("prompt", start), *(("input_extra", text) for _, text in files)]
    for name, text in texts:
        frontend.text.check_fits(text, frontend.card.max_prompt_len, name)
    before, after = parts["input_prefix"], parts["input_suffix"]
    infill = completion.in_the_middle(frontend, "input_suffix", before, after, files, start)
    given = {name: value for name, value in raw.items() if name not in (*parts, "input_extra", "prompt")}
    return _read(given, infill.token_ids, frontend, caller, infill)


def _read(
    raw: Mapping[str, Any], prompt: Any, frontend: Frontend, caller: Caller, infill: Infill | None = None
) -> LlamaCall:
    given = validate(Common, raw)
    _refuse_elsewhere(raw)
    fields = {name: value for name, value in raw.items() if name not in _OURS}
    fields["prompt"] = prompt
    is_prompt_only = given.n_predict == 0
    if is_prompt_only:
        fields["n_predict"] = 1
    if fields.get("mirostat") in (1, 2):  # which replaces all others there but the temperature
        fields = _chosen(fields, ["temperature"])
    elif given.samplers is not None:
        fields = _chosen(fields, given.samplers)
    probabilities = fields.pop("n_probs", None)
    if probabilities:
        fields["logprobs"] = probabilities
    if fields.get("seed") == -1:  # llama.cpp: a seed of its own
        del fields["seed"]
    if (fields.get("repeat_penalty") or 1) == 1:  # nothing is penalised, whatever the window
        fields.pop("repeat_last_n", None)
    if fields.get("logit_bias") is not None:
        fields["logit_bias"] = _bias(fields["logit_bias"], frontend)
    try:
        call = completion.prepare(fields, frontend, caller, default_max_tokens=None)
        _finish(call, infill, frontend)
    except InvalidRequest as error:
        raise _named(error, raw) from None
    call.body.stream = given.stream
    returned = _returned(given.response_fields or [])
    return LlamaCall(call, bool(given.return_tokens), returned, (given.t_max_predict_ms or 0) / 1000, is_prompt_only)


def _refuse_elsewhere(raw: Mapping[str, Any]) -> None:
    for name, place in _ELSEWHERE.items():
        if raw.get(name):
            raise InvalidRequest(f"{name} is for {place}", name)


def _returned(value: Any) -> list[str]:
    returned = want(value, list, "an array of names", "response_fields")
    if len(returned) > MAX_FIELDS:
        raise InvalidRequest(f"at most {MAX_FIELDS} response_fields, not {len(returned)}", "response_fields")
    for name in returned:
        if len(want(name, str, "a string", "response_fields")) > MAX_NAME:
            raise InvalidRequest(f"a name in response_fields has more than {MAX_NAME} characters", "response_fields")
    return returned


def _finish(call: CompletionCall, infill: Infill | None, frontend: Frontend) -> None:
    if infill is not None:
        [item] = call.items
        call.items = [dataclasses.replace(item, sampling=completion.ending(item.sampling, infill.stop_token_ids))]
    try:
        completion.check(call, frontend)
    except InvalidRequest as error:
        if infill is None or error.param != "prompt":
            raise
        name = "input_prefix, input_suffix, input_extra and prompt"
        raise InvalidRequest(str(error).replace("prompt", name, 1), name) from None


def _named(error: InvalidRequest, raw: Mapping[str, Any]) -> InvalidRequest:
    """The error, about the field as the client called it."""
    for ours, theirs in _NAMES.items():
        if error.param == ours and theirs in raw:
            return InvalidRequest(str(error).replace(ours, theirs, 1), theirs)
    return error


def _chosen(fields: dict[str, Any], samplers: Any) -> dict[str, Any]:
    """The fields with those samplers off that are not named."""
    want(samplers, list, "an array of names of samplers", "samplers")
    for name in samplers:
        if not isinstance(name, str) or name not in _OFF:
            raise InvalidRequest(f"samplers: {shown(name)} is not one of {', '.join(_OFF)}", "samplers")
    off = {field: value for name, values in _OFF.items() if name not in samplers for field, value in values.items()}
    off |= {"repeat_penalty": None} if "repetition_penalty" in off else {}
    if fields.get("temperature") == 0:  # greedy, as llama.cpp leaves it
        off.pop("temperature", None)
    return fields | off


def _prompt(prompt: Any, frontend: Frontend) -> Any:
    """Ids where texts and ids are mixed in one prompt; anything else as it is."""
    if not isinstance(prompt, list) or {type(part) for part in prompt} != {int, str}:
        return prompt
    ids: list[int] = []
    for number, part in enumerate(prompt):
        if isinstance(part, int):
            ids.append(part)
        else:
            frontend.text.check_fits(part, frontend.card.max_prompt_len, f"prompt[{number}]")
            ids += frontend.text.encode(part, add_special_tokens=number == 0)
    return ids


def _bias(value: Any, frontend: Frontend) -> Any:
    """llama.cpp's pairs of a token or a text and a number, or false for never, as an object of ids."""
    if isinstance(value, dict):
        pairs = list(value.items())
    else:
        want(value, list, "an object, or an array of pairs", "logit_bias")
        pairs = [_pair(pair, f"logit_bias[{number}]") for number, pair in enumerate(value)]
    if len(pairs) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"logit_bias has more than {MAX_TOKEN_IDS} entries", "logit_bias")
    bias: dict[str, Any] = {}
    for key, number in pairs:
        amount = -100 if number is False else number
        if isinstance(key, int) or key.isdecimal():
            bias[str(key)] = amount
        else:
            for token_id in frontend.text.encode(key, add_special_tokens=False, parse_special=False):
                bias[str(token_id)] = amount
    return bias


def _pair(pair: Any, at: str) -> tuple[int | str, Any]:
    is_pair = isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str)
    if not is_pair:
        raise InvalidRequest(f"{at} must be a pair of a token or a text and a number, not {shown(pair)}", "logit_bias")
    return pair[0], pair[1]


def _files(value: Any) -> list[tuple[str, str]]:
    want(value, list, "an array of objects", "input_extra")
    if len(value) > MAX_FILES:
        raise InvalidRequest(f"at most {MAX_FILES} entries of input_extra, not {len(value)}", "input_extra")
    files: list[tuple[str, str]] = []
    for number, entry in enumerate(value):
        at = f"input_extra[{number}]"
        want(entry, dict, "an object", at)
        name, text = entry.get("filename", "snippet"), entry.get("text")
        files.append((want(name, str, "a string", f"{at}.filename"), want(text, str, "a string", f"{at}.text")))
    return files
