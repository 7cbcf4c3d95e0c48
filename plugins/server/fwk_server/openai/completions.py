"""``POST /v1/completions``: its replies."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import orjson

from fwk.interfaces.dialect import Frontend, OutputDelta
from fwk.types import TokenLogprobs
from fwk_server._common.chat.outputs import Choice, Usage, collect, of_features, run
from fwk_server._common.completion import CompletionCall
from fwk_server._common.hidden import last_state
from fwk_server._common.logprobs import LegacyLogprobs, TokenTexts, joined, prompt_logprobs
from fwk_server._common.replies import event
from fwk_server._common.transfers import transfer_fields


def _frame(call: CompletionCall, frontend: Frontend) -> dict[str, Any]:
    model = call.body.model or frontend.card.name
    return {
        "id": f"cmpl-{call.body.request_id or uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


async def complete(call: CompletionCall, frontend: Frontend, tokens: TokenTexts) -> dict[str, Any]:
    """The reply in one piece; the choices of prompt ``i`` are numbered from ``i * n``."""
    frame = _frame(call, frontend)
    usage = Usage(call.items, counts_output=not call.is_prompt_only)
    results = await collect(frontend, call.items, usage)
    if call.items[0].sampling.prompt_logprobs is None:
        choices = _choices(call, results, tokens)
    else:
        choices = await frontend.run_blocking(lambda: list(map(_written, _choices(call, results, tokens))))
    told = transfer_fields(choice.transfer for every in results for choice in every)
    return frame | {"choices": list(choices), "usage": usage.body(), **told}


def _choices(call: CompletionCall, results: list[list[Choice]], tokens: TokenTexts) -> Iterator[dict[str, Any]]:
    for prompt, choices in enumerate(results):
        for index, choice in enumerate(choices):
            yield _choice(call, prompt, index, choice, choices[0].prompt_logprobs, tokens)


def _written(choice: dict[str, Any]) -> orjson.Fragment:
    """A choice as JSON already: there may be much of it, to be written off the event loop."""
    return orjson.Fragment(orjson.dumps(choice))


def _choice(
    call: CompletionCall,
    prompt: int,
    index: int,
    choice: Choice,
    scored: list[TokenLogprobs | None] | None,
    tokens: TokenTexts,
) -> dict[str, Any]:
    if call.is_prompt_only:
        choice = Choice(finish_reason="length")
    body, echo, prompt_ids = call.body, call.echoes[prompt], call.items[prompt].prompt_token_ids
    text = echo + "".join(choice.texts)
    reply: dict[str, Any] = {"index": prompt * call.n + index, "text": text, "logprobs": None}
    if body.logprobs is not None:
        writer = LegacyLogprobs(tokens, body.logprobs, call.skips_special)
        first = writer.prompt(prompt_ids, scored or [], len(echo)) if body.echo else None
        reply["logprobs"] = joined(first, writer.output(choice.logprobs, len(text)))
    reply["finish_reason"] = choice.finish_reason
    reply["stop_reason"] = reply["matched_stop"] = choice.stop_reason
    reply["prompt_logprobs"] = None  # as vLLM has it; a stream has no such field
    if body.prompt_logprobs is not None:
        reply["prompt_logprobs"] = prompt_logprobs(tokens, scored or [], body.prompt_logprobs)
    if body.return_token_ids:
        reply["prompt_token_ids"] = prompt_ids
        reply["token_ids"] = choice.token_ids
    if body.return_hidden_states:
        reply["hidden_states"] = last_state(choice.hidden_states, len(prompt_ids))
    return reply | of_features(choice)


async def events(call: CompletionCall, frontend: Frontend, tokens: TokenTexts) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events, those of a step together."""
    usage = Usage(call.items, counts_output=not call.is_prompt_only)
    writer = ChunkWriter(call, _frame(call, frontend), tokens, usage)
    async with aclosing(run(frontend, call.items, usage)) as steps:
        async for prompt, deltas in steps:
            chunks = b"".join([writer.chunk(prompt, delta) for delta in deltas])
            if chunks:
                yield chunks
    if call.body.has_usage:
        yield writer.usage()


class ChunkWriter:
    """Writes the chunks of one stream. Those that carry only text, nearly all, are glued from prepared bytes."""

    def __init__(self, call: CompletionCall, frame: dict[str, Any], tokens: TokenTexts, usage: Usage) -> None:
        body = call.body
        self._call = call
        self._body = body
        self._frame = frame
        self._tokens = tokens
        self._usage = usage
        self._is_plain = not (
            body.logprobs is not None
            or body.echo
            or body.return_token_ids
            or body.return_hidden_states
            or body.has_running_usage
        )
        self._head = b"data: " + orjson.dumps(frame)[:-1] + b',"choices":[{"index":'
        self._started: set[int] = set()  # choices that have had a chunk
        self._writers: dict[int, LegacyLogprobs] = {}
        self._lengths: dict[int, int] = {}
        self._hidden: dict[int, list[bytes]] = {}
        self._scored: dict[int, list[TokenLogprobs | None]] = {}  # per prompt
        self._held: dict[int, list[OutputDelta]] = {}

    def chunk(self, prompt: int, delta: OutputDelta) -> bytes:
        """The event of a delta; nothing for one that brings neither text nor an end nor anything asked for."""
        if self._is_plain and delta.finish_reason is None and not delta.reply:
            if not delta.text:
                return b""
            index = prompt * self._call.n + delta.index
            tail = b',"logprobs":null,"finish_reason":null}]}\n\n'
            return b'%b%d,"text":%b%b' % (self._head, index, orjson.dumps(delta.text), tail)
        if self._body.echo and self._body.logprobs is not None and prompt not in self._scored:
            return self._await_score(prompt, delta)
        return self._full(prompt, delta)

    def _await_score(self, prompt: int, delta: OutputDelta) -> bytes:
        """Every choice opens with the prompt's scores, which come with the first tokens of the prompt's choice 0."""
        held = self._held.setdefault(prompt, [])
        if delta.index != 0:
            held.append(delta)
            return b""
        self._scored[prompt] = delta.prompt_logprobs or []
        return b"".join([self._full(prompt, known) for known in (delta, *self._held.pop(prompt))])

    def _full(self, prompt: int, delta: OutputDelta) -> bytes:
        index = prompt * self._call.n + delta.index
        is_first = index not in self._started
        if self._call.is_prompt_only:
            if not is_first:
                return b""
            delta = dataclasses.replace(
                delta, text="", token_ids=[], logprobs=None, finish_reason="length", stop_reason=None
            )
        self._started.add(index)
        echo = self._call.echoes[prompt] if is_first else ""
        choice: dict[str, Any] = {"index": index, "text": echo + delta.text, "logprobs": None}
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(prompt, index, delta, self._body.logprobs)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = choice["matched_stop"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._call.items[prompt].prompt_token_ids
        if self._body.return_hidden_states:
            rows = self._hidden.setdefault(index, [])
            rows += delta.hidden_states or []
            if delta.finish_reason is not None:
                choice["hidden_states"] = last_state(rows, len(self._call.items[prompt].prompt_token_ids))
        chunk = {**self._frame, "choices": [choice | of_features(delta)]}
        if self._body.has_running_usage:
            chunk["usage"] = self._usage.body()
        return event(chunk)

    def _logprobs(self, prompt: int, index: int, delta: OutputDelta, num_top: int) -> dict[str, Any] | None:
        echo, piece = self._call.echoes[prompt], None
        writer = self._writers.get(index)
        if writer is None:
            writer = self._writers[index] = LegacyLogprobs(self._tokens, num_top, self._call.skips_special)
            self._lengths[index] = len(echo)
            if self._body.echo:
                prompt_ids = self._call.items[prompt].prompt_token_ids
                piece = writer.prompt(prompt_ids, self._scored[prompt], len(echo))
        self._lengths[index] += len(delta.text)
        if not delta.logprobs and piece is None:
            return None
        text_len = self._lengths[index] if delta.finish_reason is not None else None
        return joined(piece, writer.output(delta.logprobs or [], text_len))

    def usage(self) -> bytes:
        """The last chunk of a stream that was asked for usage."""
        return event({**self._frame, "choices": [], "usage": self._usage.body()})
