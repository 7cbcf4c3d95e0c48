"""LightLLM's own ``/generate`` and ``/generate_stream`` (``--generate-api lightllm``): the paths and ``inputs`` of TGI,
and other parameters and replies.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, OutputDelta
from fwk_server._common import completion
from fwk_server._common.body import want
from fwk_server._common.caller import Caller
from fwk_server._common.chat.models import CompletionRequest
from fwk_server._common.chat.other_names import refuse_unknown
from fwk_server._common.chat.outputs import Usage, collect, run
from fwk_server._common.chat.served import check_named
from fwk_server._common.completion import CompletionCall
from fwk_server._common.replies import event

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

# LightLLM's names of fields of completions; None: says nothing about the text.
_NAMES = {
    "guided_json": "guided_json",
    "allowed_token_ids": "allowed_token_ids",
    "return_details": None,
    "print_eos_token": None,
    "do_sample": None,
}


@dataclass(slots=True)
class LightCall:
    """A request, ready to run."""

    call: CompletionCall
    has_details: bool


def read(raw: Mapping[str, Any], frontend: Frontend, caller: Caller) -> LightCall:
    """Read, tokenise and check. Raises ``InvalidRequest``."""
    check_named(raw, frontend.card)
    if "inputs" not in raw:
        raise InvalidRequest("inputs is required", "inputs")
    if raw.get("multimodal_params"):
        raise InvalidRequest("multimodal_params: this route reads text only", "multimodal_params")
    parameters = want(raw.get("parameters") or {}, dict, "an object", "parameters")
    known = {name: value for name, value in parameters.items() if name not in _NAMES}
    refuse_unknown(known, [CompletionRequest, *frontend.processor_params], "parameters")
    fields = {name: value for name, value in known.items() if value is not None}
    for theirs, ours in _NAMES.items():
        if ours is not None and parameters.get(theirs) is not None:
            fields[ours] = parameters[theirs]
    samples = want(parameters.get("do_sample") or False, bool, "true or false", "do_sample")
    if not samples and (parameters.get("do_sample") is not None or "temperature" not in frontend.preferred_sampling):
        fields["temperature"] = 0
    has_details = want(parameters.get("return_details") or False, bool, "true or false", "return_details")
    fields["prompt"] = want(raw["inputs"], str, "a string", "inputs")
    fields["logprobs"] = 0
    fields.pop("stream", None)
    call = completion.prepare(fields, frontend, caller, default_max_tokens=None)
    return LightCall(completion.check(call, frontend), has_details)


async def complete(asked: LightCall, frontend: Frontend) -> dict[str, Any]:
    """The reply in one piece."""
    items = asked.call.items
    [choices] = await collect(frontend, items, Usage(items))
    reply: dict[str, Any] = {
        "generated_text": ["".join(choice.texts) for choice in choices],
        "count_output_tokens": _one([len(choice.token_ids) for choice in choices]),
        "finish_reason": _one([choice.finish_reason for choice in choices]),
        "prompt_tokens": len(items[0].prompt_token_ids),
    }
    if asked.has_details:
        reply["tokens"] = _one(
            [
                [
                    {
                        "id": entry.token_id,
                        "text": frontend.text.token_bytes(entry.token_id).decode("utf-8", "replace"),
                        "logprob": max(entry.logprob, LOWEST),
                        "special": False,
                    }
                    for entry in choice.logprobs
                ]
                for choice in choices
            ]
        )
    return reply


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


async def events(asked: LightCall, frontend: Frontend) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events, one for each token."""
    items = asked.call.items
    async with aclosing(run(frontend, items, Usage(items))) as steps:
        async for _, deltas in steps:
            frames = [frame for delta in deltas for frame in _frames(delta, len(items[0].prompt_token_ids), frontend)]
            yield b"".join(map(event, frames))


def _frames(delta: OutputDelta, num_prompt_tokens: int, frontend: Frontend) -> list[dict[str, Any]]:
    """A frame for each token of a delta, which may hold several, or one for text without a token."""
    ids: list[int | None] = [*delta.token_ids] or [None]
    scores = [None if i is None else max(i.logprob, LOWEST) for i in delta.logprobs or []] or [None] * len(ids)
    frames: list[dict[str, Any]] = []
    for i, (token_id, text, score) in enumerate(zip(ids, _texts(delta, frontend), scores, strict=True), 1):
        left = len(ids) - i
        token = {"id": token_id, "text": text, "logprob": score, "special": False, "prompt_tokens": num_prompt_tokens}
        frames.append(
            {
                "token": token | {"count_output_tokens": delta.num_output_tokens - left},
                "index": delta.index,
                "generated_text": None,
                "finished": left == 0 and delta.finish_reason is not None,
                "finish_reason": None if left else delta.finish_reason,
                "details": None,
            }
        )
    return frames


def _texts(delta: OutputDelta, frontend: Frontend) -> list[str]:
    """The text of each token of a delta; where tokens have no text of their own, all of it is the last one's."""
    try:
        texts = [frontend.text.token_bytes(token_id).decode() for token_id in delta.token_ids]
    except UnicodeDecodeError:
        texts = []
    if texts and "".join(texts) == delta.text:
        return texts
    return [""] * (len(delta.token_ids) - 1) + [delta.text]
