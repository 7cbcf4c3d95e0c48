"""Fields that ask for something this server cannot do: refused by name, never silently ignored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fwk.errors import InvalidRequest

# Refused whenever they say anything: null, false, "", 0, [] and {} ask for nothing.
_REFUSED = {
    "audio": "this server generates text only",
    "moderation": "this server has no moderation",
    "web_search_options": "this server has no web search",
    "suffix": "this server's model does not fill in the middle",
    "guided_decoding_backend": "the grammar backend is the server's choice (--grammar-backend)",
    "structural_tag": "structural_tag is not supported; tools with tool_choice are",
    "stop_regex": "stop is for strings here; stop_regex is not supported",
    "use_beam_search": "this server has no beam search",
    "chat_template": "the model's own chat template is used; a request cannot bring one",
    "documents": "documents are not supported: put their text into a message",
    "truncate_prompt_tokens": "inputs are not truncated: send a shorter one",
    "logprob_token_ids": "logprob_token_ids is not supported",
    "return_tokens_as_token_ids": "return_tokens_as_token_ids is not supported; return_token_ids is",
    "return_prompt_text": "return_prompt_text is not supported; echo is",
    "thinking_token_budget": "thinking_token_budget is not supported: thinking counts towards max_tokens",
    "lora_path": "LoRA adapters are for chat completions and completions",
    "kv_transfer_params": "this server does not transfer KV",
    "vllm_xargs": "vllm_xargs is not supported: logits processors declare their own fields",
    "custom_params": "custom_params is not supported: logits processors declare their own fields",
    "custom_logit_processor": "code in a request is never run",
}


def _is_text_only(value: Any) -> bool:
    return value in ([], ["text"])


# Fine with one value, refused with any other.
_ONLY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "modalities": (_is_text_only, "this server generates text only: modalities must be ['text']"),
    "length_penalty": (lambda value: value == 1, "length_penalty belongs to beam search, which this server has not"),
    "spaces_between_special_tokens": (lambda value: value is True, "special tokens are always spaced by the tokeniser"),
}


NAMES = _REFUSED.keys() | _ONLY.keys()


def refuse_unsupported(raw: Mapping[str, Any], reads: Collection[str] = ()) -> None:
    """Raise for the first field of a request that this server would have to ignore; the route ``reads`` some."""
    for name in raw.keys() & _REFUSED.keys() - set(reads):
        if raw[name]:
            raise InvalidRequest(f"{name}: {_REFUSED[name]}", name)
    for name in raw.keys() & _ONLY.keys():
        is_fine, sentence = _ONLY[name]
        if raw[name] is not None and not is_fine(raw[name]):
            raise InvalidRequest(sentence, name)
