"""The routes."""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from fwk import __version__
from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import DialectContext, EmbedInput, Frontend
from fwk_http.replies import ByteStream
from fwk_server._common import body
from fwk_server._common.caller import Caller, caller_of
from fwk_server._common.chat.call import check, prepare
from fwk_server._common.chat.dialect import ChatDialect, Running, told
from fwk_server._common.chat.served import capabilities, check_model
from fwk_server._common.documented import LINES, Reply
from fwk_server._common.logprobs import TokenTexts, chat_logprobs
from fwk_server._common.replies import json_response
from fwk_server._common.replies import reply as replied
from fwk_server.ollama.request import (
    ChatBody,
    EmbedBody,
    GenerateBody,
    ShowBody,
    chat_fields,
    generate_fields,
    is_load,
    served_name,
)

if TYPE_CHECKING:
    from fastapi import FastAPI


class ErrorBody(Reply):
    """Every error."""

    error: str


class OllamaDialect(ChatDialect):
    """Ollama's API over the served model."""

    requests = {
        "/api/chat": ChatBody,
        "/api/generate": GenerateBody,
        "/api/embed": EmbedBody,
        "/api/embeddings": EmbedBody,
        "/api/show": ShowBody,
    }

    def __init__(self, context: DialectContext) -> None:
        super().__init__(context)
        self._tokens = TokenTexts(context.frontend.text)

    def routes(self, app: FastAPI) -> None:
        self.route(app, "/api/chat", self.chat, error=ErrorBody, stream=LINES)
        self.route(app, "/api/generate", self.generate, error=ErrorBody, stream=LINES)
        self.route(app, "/api/embed", self.embed, error=ErrorBody)
        self.route(app, "/api/embeddings", self.embed_one, error=ErrorBody)
        self.route(app, "/api/show", self.show, error=ErrorBody)
        for path, endpoint in (("/api/tags", self.tags), ("/api/ps", self.ps), ("/api/version", self.version)):
            self.route(app, path, endpoint, error=ErrorBody, method="GET")

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        return {"error": message}

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, is_chat=True)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt, or with ``raw`` continue it."""
        return await self._answer(request, is_chat=False)

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        data = await body.read(request)
        started = time.perf_counter_ns()
        made = await self.frontend.run_blocking(self._made, data, is_chat, caller_of(request))
        raw, running = made
        writer = _Writer(self._name(raw), is_chat, started, self._tokens)
        if running is None:
            return json_response(writer.loaded())
        if raw.get("stream") is False:
            return await replied(request, writer.whole(running))
        return ByteStream(writer.lines(running), _last_words, media_type=LINES)

    def _made(self, data: bytes, is_chat: bool, caller: Caller) -> tuple[Mapping[str, Any], Running | None]:
        raw = body.parse(data)
        body.validate(ChatBody if is_chat else GenerateBody, raw)
        check_model(served_name(raw, self.frontend.card), self.frontend.card)
        if is_load(raw):
            return raw, None
        fields = (chat_fields if is_chat else generate_fields)(raw, self.frontend.card)
        call = prepare(fields, self.frontend, caller)
        if not is_chat and raw.get("raw"):
            call.item = replace(call.item, prompt_token_ids=self.frontend.text.encode(raw["prompt"]))
        return raw, Running(check(call, self.frontend), self)

    def _name(self, raw: Mapping[str, Any]) -> str:
        return raw.get("model") or self.frontend.card.name

    async def embed(self, request: Request) -> Response:
        """Turn texts into vectors."""
        raw = body.parse(await body.read(request))
        body.validate(EmbedBody, raw)
        value = raw.get("input")
        texts = [value] if isinstance(value, str) else value
        vectors, count = await self._vectors(raw, texts, caller_of(request))
        return json_response({"model": self._name(raw), "embeddings": vectors, "prompt_eval_count": count})

    async def embed_one(self, request: Request) -> Response:
        """Ollama's older route: one text."""
        raw = body.parse(await body.read(request))
        body.validate(EmbedBody, raw)
        vectors, _ = await self._vectors(raw, [raw.get("prompt")], caller_of(request))
        return json_response({"embedding": vectors[0]})

    async def _vectors(self, raw: Mapping[str, Any], texts: Any, caller: Caller) -> tuple[list[Any], int]:
        frontend = self.frontend
        check_model(served_name(raw, frontend.card), frontend.card)
        frontend.card.check_task("embed")
        if frontend.card.has_token_vectors:
            raise InvalidRequest(f"the model {frontend.card.name!r} makes a vector of each token: use /pooling")
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequest("input must be a text or an array of texts, none of them empty", "input")
        for text in texts:
            frontend.text.check_fits(text, frontend.card.max_prompt_len, "input")
        items = [EmbedInput(await frontend.run_blocking(frontend.text.encode, text)) for text in texts]
        items = [frontend.check_embed(item) for item in items]
        found = await frontend.embed(items)
        vectors = [struct.unpack(f"<{len(vector) // 4}f", vector) for vector in found]
        return vectors, sum(len(item.token_ids) for item in items)

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    async def tags(self, request: Request) -> Response:
        """The served models."""
        return json_response({"models": [_listed(peer) for peer in self.frontend.peers]})

    async def ps(self, request: Request) -> Response:
        """Those of them that are loaded."""
        more = {"expires_at": datetime(9999, 1, 1, tzinfo=UTC).isoformat(), "size_vram": 0}
        loaded = [peer for peer in self.frontend.peers if peer.is_loaded]
        models = [{**_listed(peer), **more, "context_length": peer.card.max_model_len} for peer in loaded]
        return json_response({"models": models})

    async def show(self, request: Request) -> Response:
        """What the served model is and can do."""
        raw = body.parse(await body.read(request))
        body.validate(ShowBody, raw)
        card = self.frontend.card
        check_model(served_name(raw, card), card)
        info = {"general.architecture": "fwk", "fwk.context_length": card.max_model_len}
        return json_response(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": _details(),
                "model_info": info,
                "capabilities": capabilities(self.frontend),
                "modified_at": _when(card.created),
            }
        )


def _listed(frontend: Frontend) -> dict[str, Any]:
    card = frontend.card
    entry = {"name": card.name, "model": card.name, "modified_at": _when(card.created), "size": 0, "digest": ""}
    return entry | {"details": _details()}


class _Writer:
    """Writes one reply; durations are nanoseconds."""

    def __init__(self, name: str, is_chat: bool, started: int, tokens: TokenTexts) -> None:
        self._name = name
        self._is_chat = is_chat
        self._started = started
        self._tokens = tokens
        self._num_scores = 0  # told

    def loaded(self) -> dict[str, Any]:
        """The reply to a request that only loads the model."""
        return self._piece({"content": ""}) | {"done": True, "done_reason": "load"}

    async def whole(self, running: Running) -> dict[str, Any]:
        """The reply in one piece."""
        first = time.perf_counter_ns()
        message = await running.whole()
        return self._piece(message) | self._scores(running) | self._end(running, first)

    async def lines(self, running: Running) -> AsyncGenerator[bytes, None]:
        """A line for each delta that says something, and a last one with the counts."""
        first, num_told = 0, 0
        async with aclosing(running.news()) as news:
            async for added, _ in news:
                first = first or time.perf_counter_ns()
                # A call is told whole: its arguments are an object here. It is, when the next one begins.
                upto = len(running.answer.calls) - (running.finish_reason is None)
                calls = running.answer.calls[num_told : max(upto, num_told)]
                num_told += len(calls)
                if calls or added.get("content") or added.get("reasoning_content"):
                    yield _line(self._piece({**added, "tool_calls": calls}) | self._scores(running))
        yield _line(self._piece({}) | self._scores(running) | self._end(running, first))

    def _scores(self, running: Running) -> dict[str, Any]:
        """The log-probabilities of the newest tokens, where they were asked for."""
        new = running.scores[self._num_scores :]
        self._num_scores += len(new)
        return {"logprobs": chat_logprobs(self._tokens, new, running.call.num_top)["content"]} if new else {}

    def _piece(self, message: Mapping[str, Any]) -> dict[str, Any]:
        piece: dict[str, Any] = {"model": self._name, "created_at": _when(time.time())}
        text, thinking = message.get("content") or "", message.get("reasoning_content")
        if not self._is_chat:
            return piece | {"response": text, "done": False} | ({"thinking": thinking} if thinking else {})
        told: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            told["thinking"] = thinking
        if message.get("tool_calls"):
            told["tool_calls"] = [_call(call["function"]) for call in message["tool_calls"]]
        return piece | {"message": told, "done": False}

    def _end(self, running: Running, first: int) -> dict[str, Any]:
        ended = time.perf_counter_ns()
        return {
            "done": True,
            "done_reason": "length" if running.finish_reason == "length" else "stop",
            "total_duration": ended - self._started,
            "load_duration": 0,
            "prompt_eval_count": len(running.call.item.prompt_token_ids),
            "prompt_eval_duration": first - self._started,
            "eval_count": running.num_output_tokens,
            "eval_duration": ended - first,
        }


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object; those cut short by the length limit are left out."""
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        arguments = {}
    return {"function": {"name": function["name"], "arguments": arguments}}


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _line(piece: Any) -> bytes:
    return orjson.dumps(piece) + b"\n"


def _last_words(error: Exception) -> bytes:
    return _line({"error": told(error)[1]})
