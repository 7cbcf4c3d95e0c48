"""From a request's fields to ``SamplingParams`` and the rest of a ``GenerateInput``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput, ModelCard
from fwk.types import SamplingParams
from fwk.types.sampling import MAX_LOGPROBS, RepetitionDetection
from fwk_server._common.body import shown, want
from fwk_server._common.caller import Caller
from fwk_server._common.chat.models import GenerateRequest

# Copied as they are; a field left out keeps the model's or the server's default.
_COPIED = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
    "return_hidden_states",
)
MAX_SCORES = 2**18
"""Log-probabilities of prompt tokens in one reply: a prompt of 131,072 tokens with one alternative each."""

_KNOWN = frozenset(SamplingParams.__struct_fields__)
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,17}")


def sampling_params(body: GenerateRequest, defaults: Mapping[str, Any], **ours: Any) -> SamplingParams:
    """The model's defaults, then what the client said, then what the route decided (``ours``; None is "not given")."""
    fields = {name: value for name, value in defaults.items() if name in _KNOWN}
    for name in _COPIED:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    if body.stop is not None:
        fields["stop"] = _stop(body.stop, "stop")
    if body.stop_regex is not None:
        fields["stop_regex"] = _stop(body.stop_regex, "stop_regex")
    if body.repetition_detection is not None:
        given = body.repetition_detection
        least = given.min_pattern_size or 1
        fields["repetition_detection"] = RepetitionDetection(given.max_pattern_size, given.min_count, least)
    if body.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    if body.include_stop_str_in_output or body.no_stop_trim:
        fields["include_stop_str_in_output"] = True
    fields.update({name: value for name, value in ours.items() if value is not None})
    return SamplingParams.unchecked(**fields)


def check_generate(body: GenerateRequest) -> None:
    """Rules between fields that both routes share."""
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of must be at least n ({body.n or 1}), not {body.best_of}", "best_of")
    if body.early_stopping not in (None, True, False, "never"):
        raise InvalidRequest("early_stopping must be true, false or 'never'", "early_stopping")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs is not available in a stream", "prompt_logprobs")


def truncated(body: GenerateRequest, card: ModelCard, token_ids: list[int]) -> list[int]:
    """The last ``truncate_prompt_tokens`` of a prompt; -1: as many as fit, with room for ``max_tokens``."""
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        most = max(1, card.max_model_len - (body.max_tokens or 1))
    if most > card.max_prompt_len:
        raise InvalidRequest(f"truncate_prompt_tokens must be at most {card.max_prompt_len}", "truncate_prompt_tokens")
    return token_ids[-most:]


def fitted(sampling: SamplingParams, is_wish: bool, card: ModelCard, prompt_len: int) -> SamplingParams:
    """A ``max_tokens`` that is a default and no wish shrinks to what fits behind a long prompt."""
    room = card.max_model_len - prompt_len
    if is_wish or sampling.max_tokens is None or room >= sampling.max_tokens:
        return sampling
    if card.shortens_prompts and sampling.max_tokens < card.max_model_len:
        return sampling  # the prompt makes room
    return msgspec.structs.replace(sampling, max_tokens=max(room, 1), min_tokens=min(sampling.min_tokens, max(room, 1)))


def _stop(value: Any, name: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    want(value, list, "a string or an array of strings", name)
    return [want(text, str, "a string", f"{name}[{i}]") for i, text in enumerate(value)]


def _logit_bias(value: Any) -> dict[int, float]:
    want(value, dict, "an object of token ids and numbers", "logit_bias")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"logit_bias: {shown(key)} is not a token id", "logit_bias")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InvalidRequest(f"logit_bias: the bias of {key} must be a number", "logit_bias")
        bias[int(key)] = float(number)
    return bias


def label_of(body: GenerateRequest, caller: Caller) -> str:
    """The client's own name of a request: a field of it, or else its header."""
    return body.request_id or body.rid or caller.label


def checked(frontend: Frontend, item: GenerateInput, names: Mapping[str, str]) -> GenerateInput:
    """Have the frontend check ``item``; errors call a field what the client called it (``names``)."""
    try:
        return frontend.check(item)
    except InvalidRequest as error:
        if error.param == "grammar" and "grammar" in names:
            raise InvalidRequest(f"{names['grammar']}: {error}", names["grammar"]) from None
        name = names.get(error.param or "")
        if name is None or error.param is None:
            raise
        message = str(error)
        if message.startswith(error.param):
            message = name + message.removeprefix(error.param)
        raise InvalidRequest(message, name) from None


def check_scores(num_top: int | None, num_tokens: int) -> None:
    """Each prompt token of each choice has its own score and ``num_top`` others': bound the product."""
    if num_top is not None and num_tokens * (min(num_top, MAX_LOGPROBS) + 1) > MAX_SCORES:
        raise InvalidRequest(
            f"prompt_logprobs of {num_tokens} prompt tokens with {num_top} alternatives each make more than "
            f"{MAX_SCORES} log-probabilities; send fewer prompts at once, or ask for fewer alternatives",
            "prompt_logprobs",
        )


def check_choices(n: int, prompts: Sequence[Any], limit: int) -> None:
    """Every choice is a sequence: bound their number, not only its factors."""
    if n * len(prompts) > limit:
        raise InvalidRequest(f"{len(prompts)} prompts with n = {n} make more than {limit} choices", "n")
