"""``POST /tokenize``, ``POST /detokenize`` and what a request's prompt is, in vLLM's shapes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput
from fwk.types.sampling import check_token_ids
from fwk_server._common import completion
from fwk_server._common.body import validate
from fwk_server._common.caller import Caller
from fwk_server._common.chat import call as chat_call
from fwk_server._common.chat.media import MediaParts
from fwk_server._common.chat.messages import chat_ids, read_messages
from fwk_server._common.chat.models import MAX_DETOKENIZED, DetokenizeRequest, TokenizeRequest
from fwk_server._common.chat.other_names import refuse_unsupported
from fwk_server._common.chat.served import adapter_of
from fwk_server._common.chat.tools import read_tools, with_tools
from fwk_server._common.logprobs import TokenTexts
from fwk_server.openai.stored import metadata_of


def tokenize(raw: Mapping[str, Any], frontend: Frontend, caller: Caller, *, tokens: TokenTexts) -> dict[str, Any]:
    """The ids of a prompt, or of messages put through the chat template."""
    body = validate(TokenizeRequest, raw)
    adapter_of(body.model, frontend)  # adapters share the tokeniser
    refuse_unsupported(raw)
    if [body.prompt, body.messages, body.content].count(None) != 2:
        raise InvalidRequest("either prompt or messages must be given (or content, as llama.cpp has it)", "prompt")
    if body.content is not None:
        ids = frontend.text.encode(body.content, add_special_tokens=bool(body.add_special or body.add_special_tokens))
    elif body.prompt is not None:
        ids = frontend.text.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        media = MediaParts(frontend)
        messages, tools = with_tools(read_messages(body.messages, media), read_tools(raw, frontend), frontend)
        ids = media.place(chat_ids(frontend.text, body, messages, bool(body.add_special_tokens), tools)).token_ids
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": frontend.card.max_model_len, "tokens": ids}
    if body.return_token_strs:
        reply["token_strs"] = [tokens.string(token_id) for token_id in ids]
    return reply


def detokenize(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> dict[str, Any]:
    """The text of ids, special tokens included."""
    body = validate(DetokenizeRequest, raw)
    adapter_of(body.model, frontend)  # adapters share the tokeniser
    check_token_ids(body.tokens, frontend.card.vocab_size, "tokens", MAX_DETOKENIZED)
    text = frontend.text.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}  # vLLM's name and llama.cpp's


_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_info(frontend: Frontend) -> dict[str, Any]:
    """The special tokens, as vLLM tells them; vocabulary and chat template stay the operator's. Reads a file."""
    weights = frontend.served_weights
    config = weights.checkpoint.tokenizer_config() if weights is not None else {}
    kind = config.get("tokenizer_class")
    told: dict[str, Any] = {"tokenizer_class": kind if isinstance(kind, str) else None}
    told["model_max_length"] = frontend.card.max_model_len
    for name in _NAMED:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token  # files have it as either
        told[name] = token if isinstance(token, str) else None
    return told


def render_chat(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> dict[str, Any]:
    """The ids that a chat completion would be computed of: routers look them up among the K/V events."""
    call = chat_call.read(raw, frontend, caller)
    if call.body.store:
        metadata_of(call)  # which refuses what would be refused
    return _rendered(call.item, raw)


def render_completion(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> list[dict[str, Any]]:
    """The same of each prompt of a completion."""
    return [_rendered(item, raw) for item in completion.read(raw, frontend, caller).items]


def _rendered(item: GenerateInput, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "request_id": item.label or uuid.uuid4().hex,
        "token_ids": item.prompt_token_ids,
        "features": None,
        "cache_salt": item.cache_salt or None,
        "model": raw.get("model"),
    }
