"""The routes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fwk import __version__
from fwk.errors import FwkError
from fwk.interfaces.dialect import Dialect, GenerateInput, OutputDelta
from fwk.interfaces.http import CLIENT_CLOSED, ByteStream, unless_disconnected
from fwk_ollama.request import ChatBody, Common, GenerateBody, read

if TYPE_CHECKING:
    from fastapi import FastAPI


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(body: dict[str, Any]) -> bytes:
    """One object of a stream."""
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


class OllamaDialect(Dialect):
    """Every answer names the model the client asked for; there is one, whatever its name."""

    def routes(self, app: FastAPI) -> None:
        async def generate(request: Request) -> Response:
            return await self._answer(request, GenerateBody)

        async def chat(request: Request) -> Response:
            return await self._answer(request, ChatBody)

        async def tags() -> dict[str, Any]:
            return {"models": [self._card()]}

        async def show() -> dict[str, Any]:
            length = self.context.frontend.card.max_model_len
            return {"details": self._card()["details"], "model_info": {"context_length": length}}

        async def version() -> dict[str, Any]:
            return {"version": __version__}

        app.add_api_route("/api/generate", generate, methods=["POST"], response_model=None)
        app.add_api_route("/api/chat", chat, methods=["POST"], response_model=None)
        app.add_api_route("/api/tags", tags, methods=["GET"])
        app.add_api_route("/api/show", show, methods=["POST"])
        app.add_api_route("/api/version", version, methods=["GET"])

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        return {"error": message}

    def _card(self) -> dict[str, Any]:
        card = self.context.frontend.card
        created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        details = {"format": "fwk", "family": "", "parameter_size": "", "quantization_level": ""}
        names = {"name": card.name, "model": card.name}
        return {**names, "modified_at": created, "size": 0, "digest": "", "details": details}

    async def _answer(self, request: Request, kind: type[Common]) -> Response:
        frontend, started = self.context.frontend, time.perf_counter_ns()
        body, item = await frontend.run_blocking(read, kind, await request.body(), frontend)
        pieces = self._pieces(body, item, started)
        if body.stream:
            return ByteStream(_lines(pieces), self._last_words, media_type="application/x-ndjson")
        whole = await unless_disconnected(request.receive, _whole(pieces))
        return Response(status_code=CLIENT_CLOSED) if whole is None else JSONResponse(whole)

    async def _pieces(self, body: Common, item: GenerateInput, started: int) -> AsyncGenerator[dict[str, Any], None]:
        """An object for each delta, and the last one with the counts."""
        first = None
        async with aclosing(self.context.frontend.generate(item)) as batches:
            async for batch in batches:
                first = first or time.perf_counter_ns()
                for delta in batch:
                    yield self._piece(body, delta) | (
                        {} if delta.finish_reason is None else _counts(item, delta, started, first)
                    )

    def _piece(self, body: Common, delta: OutputDelta) -> dict[str, Any]:
        is_done = delta.finish_reason is not None
        text = (
            {"message": {"role": "assistant", "content": delta.text}}
            if isinstance(body, ChatBody)
            else {"response": delta.text}
        )
        return {"model": body.model or self.context.frontend.card.name, "created_at": now(), **text, "done": is_done}

    def _last_words(self, error: Exception) -> bytes:
        return line({"error": str(error) if isinstance(error, FwkError) else "internal server error"})


def _counts(item: GenerateInput, delta: OutputDelta, started: int, first: int) -> dict[str, Any]:
    """Of the last object; durations are nanoseconds."""
    ended = time.perf_counter_ns()
    return {
        "done_reason": "length" if delta.finish_reason == "length" else "stop",
        "total_duration": ended - started,
        "load_duration": 0,
        "prompt_eval_count": len(item.prompt_token_ids),
        "prompt_eval_duration": first - started,
        "eval_count": delta.num_output_tokens,
        "eval_duration": ended - first,
    }


async def _lines(pieces: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """The stream; closing it closes the pieces, and so aborts the request."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield line(piece)


async def _whole(pieces: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    """All pieces as one."""
    texts, last = [], dict[str, Any]()
    async with aclosing(pieces):
        async for last in pieces:
            texts.append(last["message"]["content"] if "message" in last else last["response"])
    text = "".join(texts)
    return {**last, **({"message": {**last["message"], "content": text}} if "message" in last else {"response": text})}
