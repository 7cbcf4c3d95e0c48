"""The routes, replies and events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from copy import copy
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.lifecycle import Stage
from fwk_http.replies import ByteStream
from fwk_server._common.batches import BatchRunner, model_of
from fwk_server._common.caller import Caller
from fwk_server._common.chat.budget import FIELD, can_budget
from fwk_server._common.chat.dialect import ChatDialect, Running, Translate, told
from fwk_server._common.documented import EVENTS, Reply
from fwk_server._common.files import FileStore
from fwk_server._common.records import Records
from fwk_server._common.replies import json_response
from fwk_server._common.replies import reply as replied
from fwk_server.anthropic import AnthropicOptions, batches
from fwk_server.anthropic.edits import check_edits
from fwk_server.anthropic.request import CountBody, MessagesBody, chat_fields, prompt_fields

if TYPE_CHECKING:
    from fastapi import FastAPI

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageReply(Reply):
    """The reply of /v1/messages."""

    id: str
    type: str
    role: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    usage: dict[str, Any]


class CountReply(Reply):
    """The reply of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicError(Reply):
    """Every error."""

    type: str
    error: dict[str, Any]


class AnthropicDialect(ChatDialect):
    """Anthropic's API over the served model."""

    requests = {"/v1/messages": MessagesBody, "/v1/messages/count_tokens": CountBody, batches.ALL: batches.BatchBody}

    def __init__(self, context: DialectContext) -> None:
        super().__init__(context)
        options = context.options or AnthropicOptions()
        self._records = Records(options.files_dir, "anthropic", self.frontend)
        self._files = FileStore(self._records, options.max_files_bytes)
        runner = BatchRunner(self.frontend, self._files, self._serve, self.error_body, options.batch_concurrency)
        self._runner = runner
        self._batches = batches.MessageBatches(self._files, runner)
        context.lifecycle.on(Stage.CLOSE, self._close)
        self._records.serve(context.lifecycle, runner.load)

    def routes(self, app: FastAPI) -> None:
        self.route(app, "/v1/messages", self.messages, reply=MessageReply, error=AnthropicError, stream=EVENTS)
        self.route(app, "/v1/messages/count_tokens", self.count_tokens, reply=CountReply, error=AnthropicError)
        self._batches.add_routes(app, self, AnthropicError)

    async def _close(self) -> None:
        await self._runner.close()
        self._records.close()

    async def _serve(self, endpoint: str, data: bytes, caller: Caller) -> dict[str, Any]:
        """The reply to a request of a batch."""
        served = self._served_by(await self.frontend.run_blocking(model_of, data))
        raw, running = await served.frontend.run_blocking(served._prepare, data, chat_fields, caller)
        return await _Writer(raw, served.frontend.card.name, tier="batch").whole(running)

    def _served_by(self, name: Any) -> AnthropicDialect:
        """This dialect over the model of this server that a request of a batch names, or over its own."""
        if not isinstance(name, str) or self.frontend.is_called(name):
            return self
        peer = next((peer for peer in self.frontend.peers if peer.is_called(name)), self.frontend)
        served = copy(self)
        served.frontend = peer
        return served

    def _prepare(self, data: bytes, translate: Translate, caller: Caller) -> tuple[Mapping[str, Any], Running]:
        raw, running = super()._prepare(data, translate, caller)
        check_edits(raw, len(running.call.item.prompt_token_ids))
        return raw, running

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        named = "stop_sequences" if param == "stop" else param
        return {"type": "error", "error": {"type": kind, "message": message, "param": named}}

    async def messages(self, request: Request) -> Response:
        """Answer a conversation."""
        raw, running = await self.read(request, chat_fields)
        writer = _Writer(raw, self.frontend.card.name)
        if raw.get("stream"):
            return ByteStream(writer.events(running), self._last_words, media_type=EVENTS)
        return await replied(request, writer.whole(running))

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation is for the served model."""
        raw, running = await self.read(request, prompt_fields)
        counted = len(running.call.item.prompt_token_ids)
        managed = {"context_management": {"original_input_tokens": counted}} if raw.get("context_management") else {}
        return json_response({"input_tokens": counted, **managed})

    def prepared(self, fields: Mapping[str, Any], caller: Caller) -> Running:
        """A call of OpenAI's fields. Clients send a budget to any model: where none can be kept, it is left out."""
        if not can_budget(self.frontend):
            fields = {name: value for name, value in fields.items() if name != FIELD}
        return super().prepared(fields, caller)

    def _last_words(self, error: Exception) -> bytes:
        return _event("error", self.error_body(*told(error), None, None))


class _Writer:
    """Writes one reply."""

    def __init__(self, raw: Mapping[str, Any], name: str, tier: str = "standard") -> None:
        self._name = raw.get("model") or name
        self._tier = tier
        self._managed = {"context_management": {"applied_edits": []}} if raw.get("context_management") else {}
        self._id = f"msg_{uuid.uuid4().hex[:24]}"
        self._index = -1  # of the block that is open, or was last
        self._kind = ""  # of the block that is open
        self._calls = 0  # begun

    def _message(self, content: list[dict[str, Any]], running: Running) -> dict[str, Any]:
        reason, sequence = _stop(running)
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "stop_details": None,
            "container": None,
            "usage": self._usage(running),
            **self._managed,
        }

    def _usage(self, running: Running) -> dict[str, Any]:
        nothing_cached = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
        return {**_usage(running), "cache_creation": nothing_cached, "service_tier": self._tier, "inference_geo": None}

    async def whole(self, running: Running) -> dict[str, Any]:
        """The reply in one piece."""
        message = await running.whole()
        content: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"], "citations": []})
        content += [_tool_use(call) for call in message.get("tool_calls") or []]
        return self._message(content, running)

    async def events(self, running: Running) -> AsyncGenerator[bytes, None]:
        """The events, from ``message_start`` to ``message_stop``."""
        yield _event("message_start", {"message": self._message([], running)})
        async with aclosing(running.news()) as news:
            async for added, _ in news:
                for line in self._added(added):
                    yield line
        for line in self._close():
            yield line
        reason, sequence = _stop(running)
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}
        yield _event("message_delta", {"delta": delta, "usage": _usage(running), **self._managed})
        yield _event("message_stop", {})

    def _added(self, added: Mapping[str, Any]) -> list[bytes]:
        lines: list[bytes] = []
        if added.get("reasoning_content"):
            lines += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            lines.append(self._delta({"type": "thinking_delta", "thinking": added["reasoning_content"]}))
        if added.get("content"):
            lines += self._block("text", {"type": "text", "text": "", "citations": []})
            lines.append(self._delta({"type": "text_delta", "text": added["content"]}))
        for call in added.get("tool_calls", ()):
            if call.get("id") is not None:
                lines += self._block(call["id"], _tool_use(call) | {"input": {}})
            if call["function"].get("arguments"):
                lines.append(self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]}))
        return lines

    def _block(self, kind: str, start: dict[str, Any]) -> list[bytes]:
        """Open a block, unless it is open already."""
        if kind == self._kind:
            return []
        lines = self._close()
        self._index, self._kind = self._index + 1, kind
        return [*lines, _event("content_block_start", {"index": self._index, "content_block": start})]

    def _close(self) -> list[bytes]:
        if not self._kind:
            return []
        lines = [self._delta({"type": "signature_delta", "signature": ""})] if self._kind == "thinking" else []
        self._kind = ""
        return [*lines, _event("content_block_stop", {"index": self._index})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its input as an object; one cut short by the length limit has an empty one."""
    try:
        arguments = orjson.loads(call["function"]["arguments"] or "{}")
    except orjson.JSONDecodeError:
        arguments = {}
    name, caller = call["function"]["name"], {"type": "direct"}
    return {"type": "tool_use", "id": call["id"], "name": name, "input": arguments, "caller": caller}


def _stop(running: Running) -> tuple[str | None, str | None]:
    """``stop_reason`` and ``stop_sequence``; None while it runs."""
    reason = running.reason
    if reason == "stop" and isinstance(running.stop_reason, str):
        return "stop_sequence", running.stop_reason
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(reason or ""), None


def _usage(running: Running) -> dict[str, Any]:
    counts = running.usage.body()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": running.answer.reasoning_tokens},
        "server_tool_use": None,
    }


def _event(kind: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"
