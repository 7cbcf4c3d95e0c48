"""The door: what a request must be before it may be queued."""

from __future__ import annotations

import dataclasses
from typing import cast

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput, Input, TextTools
from fwk.text.prompt_limits import PromptLimits
from fwk.types import SamplingParams
from fwk.types.sampling import MAX_N, check_token_ids
from fwk_stops.patterns import stop_patterns

MAX_LABEL = 256
MAX_SALT = 256

NO_LIMITS = PromptLimits()


def check_embed_input(
    item: EmbedInput, *, max_model_len: int, vocab_size: int, limits: PromptLimits = NO_LIMITS
) -> EmbedInput:
    """Check an input to make an embedding of, and shorten it if that is wanted. Raises ``InvalidRequest``.

    Pairs of texts are not shortened: where the second one begins would move.
    """
    max_len = limits.bound(max_model_len)
    if not item.segment_start:
        item = dataclasses.replace(item, token_ids=limits.shortened(item.token_ids, max_len))
    length = len(item.token_ids)
    if length == 0:
        raise InvalidRequest("the input is empty: it must have at least one token", "input")
    if length > max_len:
        raise InvalidRequest(
            f"the input has {length} tokens; this server takes at most {max_len}, and cuts nothing off", "input"
        )
    check_token_ids(item.token_ids, vocab_size, "input", max_model_len)
    if not 0 <= item.segment_start < length:
        raise InvalidRequest(f"segment_start must be one of the {length} tokens, not {item.segment_start}", "input")
    _check_standing(item)
    return item


def _check_standing(item: EmbedInput | GenerateInput) -> None:
    """Check what a schedule policy may go by."""
    if not -(2**31) <= item.priority < 2**31:
        raise InvalidRequest(f"priority must be between {-(2**31)} and {2**31 - 1}", "priority")
    item.service.check()


def _check_stops(sampling: SamplingParams, text: TextTools) -> None:
    """Check what ends a text where it is found in it."""
    if (sampling.stop or sampling.stop_regex) and not text.has_tokenizer:
        name = "stop" if sampling.stop else "stop_regex"
        why = "this server has no tokenizer (--skip-tokenizer-init)"
        raise InvalidRequest(f"{name} is text to look for, and {why}: give stop_token_ids", name)
    if sampling.stop_regex:
        try:
            stop_patterns(tuple(sampling.stop_regex))
        except ValueError as error:
            raise InvalidRequest(f"stop_regex: {error}", "stop_regex") from None


def prepare_input(
    item: Input,
    text: TextTools,
    *,
    max_model_len: int,
    vocab_size: int,
    limits: PromptLimits = NO_LIMITS,
) -> Input:
    """Check an input and complete it: max_tokens resolved, bad words tokenised, a long prompt shortened if wanted.

    Raises ``InvalidRequest``.
    """
    if isinstance(item, EmbedInput):
        found = check_embed_input(item, max_model_len=max_model_len, vocab_size=vocab_size, limits=limits)
        return cast("Input", found)
    max_len = limits.bound(max_model_len - 1)
    fits = min(max_len, max_model_len - max(limits.reserved(item.sampling.max_tokens), 1))
    if not item.media:  # of an image no half is left
        item = dataclasses.replace(item, prompt_token_ids=limits.shortened(item.prompt_token_ids, fits))
    length = len(item.prompt_token_ids)
    if length == 0:
        raise InvalidRequest("the prompt is empty: it must have at least one token", "prompt")
    if length > max_len:
        why = ", so that one can follow" if max_len == max_model_len - 1 else " (--max-req-input-len)"
        raise InvalidRequest(f"the prompt has {length} tokens; this server takes at most {max_len}{why}", "prompt")
    check_token_ids(item.prompt_token_ids, vocab_size, "prompt", max_model_len)
    if not 1 <= item.n <= MAX_N:
        raise InvalidRequest(f"n must be between 1 and {MAX_N}, not {item.n}", "n")
    _check_standing(item)
    if len(item.cache_salt) > MAX_SALT:
        raise InvalidRequest(f"cache_salt has more than {MAX_SALT} characters", "cache_salt")
    sampling = item.sampling
    room = max_model_len - length
    if sampling.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=max(room, sampling.min_tokens))
    sampling = limits.shortened_answer(sampling, room)
    sampling.check(vocab_size)
    if (sampling.max_tokens or 0) > room:
        raise InvalidRequest(
            f"the prompt has {length} tokens and max_tokens is {sampling.max_tokens}, "
            f"but this server's context is {max_model_len} tokens",
            "max_tokens",
        )
    _check_stops(sampling, text)
    if sampling.bad_words:
        # With and without a space before, as the word may stand anywhere in a text.
        spellings = [form for word in sampling.bad_words for form in (word, " " + word.lstrip())]
        ids = [text.encode(form, add_special_tokens=False) for form in spellings]
        sampling = msgspec.structs.replace(sampling, bad_words=[], bad_word_token_ids=[i for i in ids if i])
        sampling.check(vocab_size)
    return dataclasses.replace(item, sampling=sampling)
