"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput, OutputDelta
from fwk_server._common.body import parse, processor_extra, validate
from fwk_server._common.caller import Caller
from fwk_server._common.replies import event
from fwk_server.openai.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from fwk_server.openai.messages import chat_ids, read_messages
from fwk_server.openai.models import ChatRequest
from fwk_server.openai.outputs import Choice, Usage, collect, run
from fwk_server.openai.refusals import refuse_tools, refuse_unsupported
from fwk_server.openai.sampling import check_generate, checked, label_of, sampling_params
from fwk_server.openai.served import check_model


@dataclass(slots=True)
class ChatCall:
    """A chat request, ready to run."""

    body: ChatRequest
    item: GenerateInput
    echo: str  # what the reply starts with: the last message, if the client asked for that

    @property
    def num_top(self) -> int:
        return self.body.top_logprobs or 0


def prepare(data: bytes, frontend: Frontend, caller: Caller) -> ChatCall:
    """Read, render and tokenise. Runs off the event loop when there is much of it."""
    raw = parse(data)
    body = validate(ChatRequest, raw)
    check_model(body.model, frontend.card)
    refuse_unsupported(raw)
    refuse_tools(raw)
    check_generate(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    messages = read_messages(body.messages)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_params(
        body,
        frontend.default_sampling,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        extra=processor_extra(frontend.processor_params, raw) or None,
    )
    item = GenerateInput(
        prompt_token_ids=chat_ids(frontend.text, body, messages, bool(body.add_special_tokens)),
        sampling=sampling,
        n=body.n or 1,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        label=label_of(body, caller),
        operation="chat",
        trace=caller.trace,
    )
    return ChatCall(body, item, messages[-1]["content"] if body.echo else "")


def check(call: ChatCall, frontend: Frontend) -> ChatCall:
    """Have the frontend complete the input."""
    names = {"logprobs": "top_logprobs", "prompt": "messages", "prompt_token_ids": "messages"}
    if call.body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    call.item = checked(frontend, call.item, names)
    return call


def _frame(call: ChatCall, frontend: Frontend, kind: str) -> dict[str, Any]:
    model = call.body.model or frontend.card.name
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def complete(call: ChatCall, frontend: Frontend, tokens: TokenTexts) -> dict[str, Any]:
    """The reply in one piece."""
    frame = _frame(call, frontend, "chat.completion")
    usage = Usage([call.item])
    [choices] = await collect(frontend, [call.item], usage)
    reply = frame | {"choices": [_choice(call, i, choice, tokens) for i, choice in enumerate(choices)]}
    reply["usage"] = usage.body()
    if call.body.prompt_logprobs is not None:
        entries = choices[0].prompt_logprobs or []
        reply["prompt_logprobs"] = prompt_logprobs(tokens, entries, call.body.prompt_logprobs)
    if call.body.return_token_ids:
        reply["prompt_token_ids"] = call.item.prompt_token_ids
    return reply


def _choice(call: ChatCall, index: int, choice: Choice, tokens: TokenTexts) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": call.echo + "".join(choice.texts), "refusal": None},
        "logprobs": chat_logprobs(tokens, choice.logprobs, call.num_top) if call.body.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "matched_stop": choice.stop_reason,
    }
    if call.body.return_token_ids:
        reply["token_ids"] = choice.token_ids
    return reply


async def events(call: ChatCall, frontend: Frontend, tokens: TokenTexts) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events, those of a step together."""
    usage = Usage([call.item])
    writer = ChunkWriter(call, _frame(call, frontend, "chat.completion.chunk"), tokens, usage)
    opening = b"".join([writer.opening(index) for index in range(call.item.n)])
    async with aclosing(run(frontend, [call.item], usage)) as steps:
        async for _, deltas in steps:
            chunks = b"".join([writer.chunk(delta) for delta in deltas])
            if opening:
                chunks, opening = opening + chunks, b""
            if chunks:
                yield chunks
    if call.body.has_usage:
        yield writer.usage()


class ChunkWriter:
    """Writes the chunks of one stream. Those that carry only text, nearly all, are glued from prepared bytes."""

    def __init__(self, call: ChatCall, frame: dict[str, Any], tokens: TokenTexts, usage: Usage) -> None:
        self._body = call.body
        self._item = call.item
        self._echo = call.echo
        self._num_top = call.num_top
        self._frame = frame
        self._tokens = tokens
        self._usage = usage
        self._is_plain = not (call.body.logprobs or call.body.return_token_ids or call.body.has_running_usage)
        head = b"data: " + orjson.dumps(frame)[:-1]
        self._heads = [head + b',"choices":[{"index":%d,"delta":{"content":' % index for index in range(call.item.n)]

    def opening(self, index: int) -> bytes:
        """The first chunk of a choice: its role, and the echo if one was asked for."""
        delta = {"role": "assistant", "content": self._echo}
        chunk = self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = self._item.prompt_token_ids
        return event(chunk)

    def chunk(self, delta: OutputDelta) -> bytes:
        """The event of a delta; nothing for one that brings neither text nor an end nor anything asked for."""
        if self._is_plain and delta.finish_reason is None:
            if not delta.text:
                return b""
            tail = b'},"logprobs":null,"finish_reason":null}]}\n\n'
            return self._heads[delta.index] + orjson.dumps(delta.text) + tail
        return self._full(delta)

    def _full(self, delta: OutputDelta) -> bytes:
        choice: dict[str, Any] = {"index": delta.index, "delta": {"content": delta.text} if delta.text else {}}
        choice["logprobs"] = None
        if self._body.logprobs and delta.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokens, delta.logprobs, self._num_top)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = choice["matched_stop"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return event(self._chunk(choice))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        # ``usage`` is left out where it is not told: the published schema does not let it be null.
        chunk = {**self._frame, "choices": [choice]}
        if self._body.has_running_usage:
            chunk["usage"] = self._usage.body()
        return chunk

    def usage(self) -> bytes:
        """The last chunk of a stream that was asked for usage."""
        return event({**self._frame, "choices": [], "usage": self._usage.body()})
