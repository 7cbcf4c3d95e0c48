"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import orjson

from fwk.interfaces.dialect import Frontend, OutputDelta
from fwk_server._common.chat.answers import Answer
from fwk_server._common.chat.call import ChatCall
from fwk_server._common.chat.outputs import Choice, Usage, collect, of_features, run
from fwk_server._common.hidden import last_state
from fwk_server._common.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from fwk_server._common.replies import event
from fwk_server._common.transfers import transfer_fields

Keep = Callable[[dict[str, Any]], Awaitable[None]]


def _frame(call: ChatCall, frontend: Frontend, kind: str) -> dict[str, Any]:
    model = call.body.model or frontend.card.name
    frame = {
        "id": f"chatcmpl-{call.body.request_id or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }
    tier = call.body.service_tier
    return frame if tier is None else frame | {"service_tier": "default" if tier == "auto" else tier}


async def complete(call: ChatCall, frontend: Frontend, tokens: TokenTexts, keep: Keep | None = None) -> dict[str, Any]:
    """The reply in one piece. ``keep`` is told it."""
    usage = Usage([call.item])
    answers = call.answers(frontend)
    watch = (lambda delta: answers[delta.index].take(delta)) if answers else None
    [choices] = await collect(frontend, [call.item], usage, watch)
    reply = _whole(call, _frame(call, frontend, "chat.completion"), choices, answers, usage, tokens)
    reply["prompt_logprobs"] = None  # as vLLM has it; a stream has no such field
    if call.body.prompt_logprobs is not None:
        entries = choices[0].prompt_logprobs or []
        # There may be much to write: off the event loop, and as JSON already.
        reply["prompt_logprobs"] = await frontend.run_blocking(
            lambda num_top: orjson.Fragment(orjson.dumps(prompt_logprobs(tokens, entries, num_top))),
            call.body.prompt_logprobs,
        )
    if keep is not None:
        await keep(reply)
    return reply


def _whole(
    call: ChatCall,
    frame: dict[str, Any],
    choices: list[Choice],
    answers: list[Answer],
    usage: Usage,
    tokens: TokenTexts,
) -> dict[str, Any]:
    """All that was said."""
    reply = frame | {"choices": [_choice(call, i, choice, tokens) for i, choice in enumerate(choices)]}
    for answer, choice in zip(answers, reply["choices"], strict=False):
        choice["message"] = answer.message(call.echo)
        choice["finish_reason"] = answer.finish_reason(choice["finish_reason"])
    _count_reasoning(answers, usage)
    reply["usage"] = usage.body()
    if call.body.return_token_ids:
        reply["prompt_token_ids"] = call.item.prompt_token_ids
    return reply | transfer_fields(choice.transfer for choice in choices)


def _count_reasoning(answers: list[Answer], usage: Usage) -> None:
    if any(answer.has_reasoning for answer in answers):
        usage.reasoning_tokens = sum(answer.reasoning_tokens for answer in answers)


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
    if call.body.return_hidden_states:
        reply["hidden_states"] = last_state(choice.hidden_states, len(call.item.prompt_token_ids))
    return reply | of_features(choice)


async def events(
    call: ChatCall, frontend: Frontend, tokens: TokenTexts, keep: Keep | None = None
) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events, those of a step together. ``keep`` is told the whole before the last of them."""
    usage = Usage([call.item])
    answers = call.answers(frontend)
    frame = _frame(call, frontend, "chat.completion.chunk")
    writer = ChunkWriter(call, frame, tokens, usage, answers)
    opening = b"".join([writer.opening(index) for index in range(call.item.n)])
    choices = [Choice() for _ in range(call.item.n)] if keep is not None else []
    async with aclosing(run(frontend, [call.item], usage)) as steps:
        async for _, deltas in steps:
            chunks = b"".join([writer.chunk(delta) for delta in deltas])
            if keep is not None:
                for delta in deltas:
                    choices[delta.index].add(delta)
                if all(choice.finish_reason is not None for choice in choices):
                    await keep(_whole(call, frame | {"object": "chat.completion"}, choices, answers, usage, tokens))
            if opening:
                chunks, opening = opening + chunks, b""
            if chunks:
                yield chunks
    if call.body.has_usage:
        yield writer.usage()


class ChunkWriter:
    """Writes the chunks of one stream. Those that carry only text, nearly all, are glued from prepared bytes."""

    def __init__(
        self, call: ChatCall, frame: dict[str, Any], tokens: TokenTexts, usage: Usage, answers: list[Answer]
    ) -> None:
        self._body = call.body
        self._item = call.item
        self._echo = call.echo
        self._num_top = call.num_top
        self._frame = frame
        self._tokens = tokens
        self._usage = usage
        self._answers = answers
        self._is_plain = not (call.body.logprobs or call.body.return_token_ids or call.body.has_running_usage)
        self._hidden: dict[int, list[bytes]] = {}
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
        if delta.hidden_states is not None:
            self._hidden.setdefault(delta.index, []).extend(delta.hidden_states)
        if self._answers:
            return self._parsed(self._answers[delta.index], delta)
        if self._is_plain and delta.finish_reason is None and not delta.reply:
            if not delta.text:
                return b""
            tail = b'},"logprobs":null,"finish_reason":null}]}\n\n'
            return self._heads[delta.index] + orjson.dumps(delta.text) + tail
        return self._full(delta, {"content": delta.text} if delta.text else {}, delta.finish_reason)

    def _parsed(self, answer: Answer, delta: OutputDelta) -> bytes:
        """As ``chunk``, for text that is read by parsers."""
        news = answer.take(delta)
        _count_reasoning(self._answers, self._usage)
        if self._is_plain and not news and delta.finish_reason is None and not delta.reply:
            return b""
        return self._full(delta, news, answer.finish_reason(delta.finish_reason))

    def _full(self, delta: OutputDelta, news: dict[str, Any], finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": delta.index, "delta": news}
        choice["logprobs"] = None
        if self._body.logprobs and delta.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokens, delta.logprobs, self._num_top)
        choice["finish_reason"] = finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = choice["matched_stop"] = delta.stop_reason
            if self._body.return_hidden_states:
                rows = self._hidden.get(delta.index, [])
                choice["delta"] = news | {"hidden_states": last_state(rows, len(self._item.prompt_token_ids))}
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return event(self._chunk(choice | of_features(delta)))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        # ``usage`` is left out where it is not told: the published schema does not let it be null.
        chunk = {**self._frame, "choices": [choice]}
        if self._body.has_running_usage:
            chunk["usage"] = self._usage.body()
        return chunk

    def usage(self) -> bytes:
        """The last chunk of a stream that was asked for usage."""
        return event({**self._frame, "choices": [], "usage": self._usage.body()})
