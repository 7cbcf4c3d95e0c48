"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend, GenerateInput, OutputDelta
from fwk_server._common.body import parse, processor_extra, validate
from fwk_server._common.caller import Caller
from fwk_server._common.replies import event
from fwk_server.openai.adapters import adapter_of
from fwk_server.openai.answers import Answer
from fwk_server.openai.constraints import Constraint, read_constraint
from fwk_server.openai.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from fwk_server.openai.messages import chat_ids, read_messages
from fwk_server.openai.models import ChatRequest
from fwk_server.openai.outputs import Choice, Usage, collect, run
from fwk_server.openai.refusals import refuse_unsupported
from fwk_server.openai.sampling import check_generate, checked, label_of, sampling_params
from fwk_server.openai.tools import ToolUse, read_tools

TAIL_TOKENS = 32
"""Of the prompt, looked at for thinking that the template has opened."""


@dataclass(slots=True)
class ChatCall:
    """A chat request, ready to run."""

    body: ChatRequest
    item: GenerateInput
    echo: str  # what the reply starts with: the last message, if the client asked for that
    tools: ToolUse | None
    constraint: str | None  # the field that asked for a grammar

    @property
    def num_top(self) -> int:
        return self.body.top_logprobs or 0

    def answers(self, frontend: Frontend) -> list[Answer]:
        """What reads the choices, where there is something to look for in their text.

        A constrained answer is all answer: nothing in it is thinking.
        """
        tail = frontend.text.decode(self.item.prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
        functions = self.tools.functions if self.tools is not None else None
        found: list[Answer] = []
        for _ in range(self.item.n):
            reasoning = frontend.reasoning_parser(tail) if self.constraint is None else None
            tools = frontend.tool_parser(functions, tail) if functions is not None else None
            if reasoning is not None or tools is not None:
                is_parallel = self.tools is None or self.tools.is_parallel
                is_silent = self.body.include_reasoning is False
                found.append(Answer(reasoning, tools, is_parallel=is_parallel, is_silent=is_silent))
        return found


def read(data: bytes, frontend: Frontend, caller: Caller) -> ChatCall:
    """A call that has been read and checked, its grammar compiled."""
    return check(prepare(data, frontend, caller), frontend)


def prepare(data: bytes, frontend: Frontend, caller: Caller) -> ChatCall:
    """Read, render and tokenise. Runs off the event loop when there is much of it."""
    raw = parse(data)
    body = validate(ChatRequest, raw)
    adapter = adapter_of(body.model, frontend, body.lora_path)
    frontend.card.check_task("generate")
    refuse_unsupported(raw, reads=("lora_path",))
    tools = read_tools(raw, frontend)
    constraint = _constraint(raw, tools, frontend)
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
        grammar=constraint[0] if constraint is not None else None,
    )
    item = GenerateInput(
        prompt_token_ids=chat_ids(
            frontend.text,
            body,
            messages,
            bool(body.add_special_tokens),
            tools.tools if tools is not None else None,
            frontend.card.max_prompt_len,
        ),
        sampling=sampling,
        n=body.n or 1,
        priority=body.urgency(caller),
        service=body.service(caller),
        cache_salt=body.cache_salt or "",
        adapter=adapter,
        label=label_of(body, caller),
        operation="chat",
        trace=caller.trace,
    )
    echo = messages[-1]["content"] if body.echo else ""
    return ChatCall(body, item, echo, tools, constraint[1] if constraint is not None else None)


def _constraint(raw: Mapping[str, Any], tools: ToolUse | None, frontend: Frontend) -> Constraint | None:
    """What the output must look like: as the request says, or a call if one must be made."""
    constraint = read_constraint(raw, frontend.grammar_kinds)
    if constraint is not None and tools is not None:
        name = constraint[1]
        raise InvalidRequest(
            f"{name} leaves no room for a tool call: leave tools out, or set tool_choice to 'none'", name
        )
    return tools.constraint if tools is not None else constraint


def check(call: ChatCall, frontend: Frontend) -> ChatCall:
    """Have the frontend complete the input."""
    names = {"logprobs": "top_logprobs", "prompt": "messages", "prompt_token_ids": "messages"}
    if call.body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if call.constraint is not None:
        names["grammar"] = call.constraint
    call.item = checked(frontend, call.item, names)
    return call


def _frame(call: ChatCall, frontend: Frontend, kind: str) -> dict[str, Any]:
    model = call.body.model or frontend.card.name
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def complete(call: ChatCall, frontend: Frontend, tokens: TokenTexts) -> dict[str, Any]:
    """The reply in one piece."""
    frame = _frame(call, frontend, "chat.completion")
    usage = Usage([call.item])
    answers = call.answers(frontend)
    watch = (lambda delta: answers[delta.index].take(delta)) if answers else None
    [choices] = await collect(frontend, [call.item], usage, watch)
    reply = frame | {"choices": [_choice(call, i, choice, tokens) for i, choice in enumerate(choices)]}
    for answer, choice in zip(answers, reply["choices"], strict=False):
        choice["message"] = answer.message(call.echo)
        choice["finish_reason"] = answer.finish_reason(choice["finish_reason"])
    _count_reasoning(answers, usage)
    reply["usage"] = usage.body()
    if call.body.prompt_logprobs is not None:
        entries = choices[0].prompt_logprobs or []
        reply["prompt_logprobs"] = prompt_logprobs(tokens, entries, call.body.prompt_logprobs)
    if call.body.return_token_ids:
        reply["prompt_token_ids"] = call.item.prompt_token_ids
    return reply


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
    return reply


async def events(call: ChatCall, frontend: Frontend, tokens: TokenTexts) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events, those of a step together."""
    usage = Usage([call.item])
    answers = call.answers(frontend)
    writer = ChunkWriter(call, _frame(call, frontend, "chat.completion.chunk"), tokens, usage, answers)
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
        if self._answers:
            return self._parsed(self._answers[delta.index], delta)
        if self._is_plain and delta.finish_reason is None:
            if not delta.text:
                return b""
            tail = b'},"logprobs":null,"finish_reason":null}]}\n\n'
            return self._heads[delta.index] + orjson.dumps(delta.text) + tail
        return self._full(delta, {"content": delta.text} if delta.text else {}, delta.finish_reason)

    def _parsed(self, answer: Answer, delta: OutputDelta) -> bytes:
        """As ``chunk``, for text that is read by parsers."""
        news = answer.take(delta)
        _count_reasoning(self._answers, self._usage)
        if self._is_plain and not news and delta.finish_reason is None:
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
