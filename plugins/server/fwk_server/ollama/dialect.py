"""The routes."""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel
from starlette.exceptions import HTTPException
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
from fwk_server._common.chat.served import UnknownModel, check_model
from fwk_server._common.completion import ending, in_the_middle
from fwk_server._common.dimensions import check_dimensions, cut
from fwk_server._common.documented import LINES, Reply
from fwk_server._common.logprobs import TokenTexts, chat_logprobs
from fwk_server._common.once import Once
from fwk_server._common.replies import json_response, off_loop, read_as
from fwk_server._common.replies import reply as replied
from fwk_server.ollama.description import INTERFACE_VERSION, Description, Descriptions, listed, running, shown, when
from fwk_server.ollama.request import (
    ChatBody,
    EmbedBody,
    GenerateBody,
    PullBody,
    ShowBody,
    chat_fields,
    generate_fields,
    is_load,
    is_unload,
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
        "/api/pull": PullBody,
    }

    def __init__(self, context: DialectContext) -> None:
        super().__init__(context)
        self._descriptions = Descriptions()
        self._once = Once()
        self._tokens = TokenTexts(context.frontend.text)

    def routes(self, app: FastAPI) -> None:
        add = partial(self.route, app, error=ErrorBody)
        add("/api/chat", self.chat, stream=LINES)
        add("/api/generate", self.generate, stream=LINES)
        add("/api/embed", self.embed)
        add("/api/embeddings", self.embed_one)
        add("/api/show", self.show)
        add("/api/pull", self.pull, stream=LINES)
        for path, endpoint in (("/api/tags", self.tags), ("/api/ps", self.ps), ("/api/version", self.version)):
            add(path, endpoint, method="GET")
        for path, (method, reason) in _NOT_HERE.items():
            given = [PATH_DIGEST] if "{digest}" in path else ()
            add(path, _Refusal(reason), method=method, parameters=given)

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        return {"error": message}

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, is_chat=True)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt, or with ``raw`` continue it."""
        return await self._answer(request, is_chat=False)

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        data = await body.read(request, is_any_kind=True)
        started = time.perf_counter_ns()
        raw, running = await off_loop(request, self.frontend, self._made, data, is_chat, caller_of(request))
        writer = _Writer(self._name(raw), is_chat, started, self._tokens)
        if running is None:
            return json_response(writer.loaded(is_unload(raw)))
        if raw.get("stream") is False:
            return await replied(request, writer.whole(running))
        return ByteStream(writer.lines(running), _last_words, media_type=LINES)

    def _made(self, data: bytes, is_chat: bool, caller: Caller) -> tuple[Mapping[str, Any], Running | None]:
        raw = body.parse(data)
        body.validate(ChatBody if is_chat else GenerateBody, raw)
        check_model(served_name(raw, self.frontend.card), self.frontend.card)
        if is_load(raw):
            return raw, None
        fields = (chat_fields if is_chat else generate_fields)(raw, self.frontend, self._once)
        call = prepare(fields, self.frontend, caller)
        if not is_chat and raw.get("suffix"):
            infill = in_the_middle(self.frontend, "suffix", raw["prompt"], raw["suffix"])
            sampling = ending(call.item.sampling, infill.stop_token_ids)
            call.item = replace(call.item, prompt_token_ids=infill.token_ids, sampling=sampling)
        elif not is_chat and raw.get("raw"):
            call.item = replace(call.item, prompt_token_ids=self.frontend.text.encode(raw["prompt"]))
        return raw, Running(check(call, self.frontend), self)

    def _name(self, raw: Mapping[str, Any]) -> str:
        return raw.get("model") or self.frontend.card.name

    async def _read_body(self, request: Request, model: type[BaseModel]) -> dict[str, Any]:
        return (await read_as(model, request, self.frontend, is_any_kind=True))[1]

    async def embed(self, request: Request) -> Response:
        """Turn texts into vectors."""
        started = time.perf_counter_ns()
        raw = await self._read_body(request, EmbedBody)
        value = raw.get("input")
        texts = ([value] if value else []) if isinstance(value, str) else value
        vectors, count = await self._vectors(raw, texts, caller_of(request))
        times = {"total_duration": time.perf_counter_ns() - started, "load_duration": 0}
        return json_response({"model": self._name(raw), "embeddings": vectors, **times, "prompt_eval_count": count})

    async def embed_one(self, request: Request) -> Response:
        """Ollama's older route: one text."""
        raw = await self._read_body(request, EmbedBody)
        text = raw.get("prompt") or raw.get("input") or ""
        vectors, _ = await self._vectors(raw, [text] if text else [], caller_of(request))
        return json_response({"embedding": vectors[0] if vectors else []})

    async def _vectors(self, raw: Mapping[str, Any], texts: Any, caller: Caller) -> tuple[list[Any], int]:
        """No text makes no vector: clients load a model so."""
        frontend, card = self.frontend, self.frontend.card
        check_model(served_name(raw, card), card)
        card.check_task("embed")
        if card.has_token_vectors:
            raise InvalidRequest(f"the model {card.name!r} makes a vector of each token: use /pooling")
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequest("input must be a text or an array of texts, none of them empty", "input")
        check_dimensions(raw.get("dimensions"), card)
        items: list[EmbedInput] = []
        for text in texts:
            if raw.get("truncate") is False:
                frontend.text.check_fits(text, card.max_prompt_len, "input")
            ids = await frontend.run_blocking(frontend.text.encode, text)
            if raw.get("truncate") is not False and len(ids) > card.max_prompt_len:
                ids = [*ids[: card.max_prompt_len - 1], ids[-1]]  # the last may be the token that ends an input
            items.append(frontend.check_embed(EmbedInput(ids)))
        found = [cut(vector, raw.get("dimensions")) for vector in await frontend.embed(items)] if items else []
        vectors = [struct.unpack(f"<{len(vector) // 4}f", vector) for vector in found]
        return vectors, sum(len(item.token_ids) for item in items)

    async def version(self, request: Request) -> Response:
        """The version of the interface that is spoken, and the server's."""
        return json_response({"version": INTERFACE_VERSION, "fwk": __version__})

    async def _described(self, frontend: Frontend) -> Description:
        return await frontend.run_blocking(self._descriptions.of, frontend)

    async def tags(self, request: Request) -> Response:
        """The served models."""
        return json_response({"models": [listed(peer, await self._described(peer)) for peer in self.frontend.peers]})

    async def ps(self, request: Request) -> Response:
        """Those of them that are loaded."""
        loaded = [peer for peer in self.frontend.peers if peer.is_loaded]
        return json_response({"models": [running(peer, await self._described(peer)) for peer in loaded]})

    async def show(self, request: Request) -> Response:
        """What the served model is and can do."""
        raw = await self._read_body(request, ShowBody)
        check_model(served_name(raw, self.frontend.card), self.frontend.card)
        return json_response(shown(self.frontend, await self._described(self.frontend)))

    async def pull(self, request: Request) -> Response:
        """Say that a served model is there. Others are the operator's to fetch."""
        raw = await self._read_body(request, PullBody)
        card = self.frontend.card
        try:
            check_model(served_name(raw, card), card)
        except UnknownModel as error:
            sentence = f"{error.detail}: the operator adds models (fwk serve --also NAME=MODEL)"
            raise HTTPException(404, sentence) from None
        steps = [] if raw.get("stream") is False else [{"status": "pulling manifest"}]
        lines = b"".join(_line(step) for step in [*steps, {"status": "success"}])
        return Response(lines, media_type=LINES if steps else "application/json")


_NOT_HERE = {
    "/api/create": ("POST", "models are made elsewhere, and served by the operator (fwk serve --also NAME=MODEL)"),
    "/api/copy": ("POST", "the operator gives a model more names (fwk serve --served-model-name NAME NAME)"),
    "/api/delete": ("DELETE", "a served model stays; the operator deletes those that are kept (fwk rm MODEL)"),
    "/api/push": ("POST", "models are not sent to registries"),
    "/api/blobs/{digest}": ("POST", "files of models are the operator's: fwk serve FOLDER"),
}
"""Routes by which Ollama's clients change its models, and what is said instead."""
PATH_DIGEST = {"name": "digest", "in": "path", "required": True, "schema": {"type": "string"}}


class _Refusal:
    """An endpoint that says why it does nothing."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self.__name__ = "refuse"
        self.__doc__ = f"Refused: {reason}."

    async def __call__(self, request: Request) -> Response:
        raise InvalidRequest(f"{request.url.path} changes nothing here: {self._reason}")


class _Writer:
    """Writes one reply; durations are nanoseconds."""

    def __init__(self, name: str, is_chat: bool, started: int, tokens: TokenTexts) -> None:
        self._name = name
        self._is_chat = is_chat
        self._started = started
        self._tokens = tokens
        self._num_calls = 0  # told
        self._num_scores = 0

    def loaded(self, is_unload: bool) -> dict[str, Any]:
        """The reply to a request that only loads the model, or would have it unloaded: it stays."""
        return self._piece({"content": ""}) | {"done": True, "done_reason": "unload" if is_unload else "load"}

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
        piece: dict[str, Any] = {"model": self._name, "created_at": when(time.time())}
        text, thinking = message.get("content") or "", message.get("reasoning_content")
        if not self._is_chat:
            return piece | {"response": text, "done": False} | ({"thinking": thinking} if thinking else {})
        told: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            told["thinking"] = thinking
        if message.get("tool_calls"):
            told["tool_calls"] = [_call(call, self._num_calls + i) for i, call in enumerate(message["tool_calls"])]
            self._num_calls += len(message["tool_calls"])
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


def _call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A reply's call with its arguments as an object; those cut short by the length limit are left out."""
    function = call["function"]
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        arguments = {}
    return {"id": call["id"], "function": {"index": index, "name": function["name"], "arguments": arguments}}


def _line(piece: Any) -> bytes:
    return orjson.dumps(piece) + b"\n"


def _last_words(error: Exception) -> bytes:
    return _line({"error": told(error)[1]})
