"""POST /mine/generate: a prompt in, its continuation out, whole or a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fwk.errors import FwkError, InvalidRequest
from fwk.interfaces.dialect import Dialect, GenerateInput
from fwk.types import SamplingParams
from fwk_http.replies import CLIENT_CLOSED, ByteStream, unless_disconnected

if TYPE_CHECKING:
    from fastapi import FastAPI


class Body(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    max_tokens: int = Field(32, ge=1)
    stream: bool = False


class MineDialect(Dialect):
    """Checks off the event loop, answers on it, and lets go when the client does."""

    def routes(self, app: FastAPI) -> None:
        async def generate(request: Request) -> Response:
            return await self._generate(request)

        app.add_api_route("/mine/generate", generate, methods=["POST"], response_model=None)

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        return {"error": message}

    async def _generate(self, request: Request) -> Response:
        frontend = self.context.frontend
        body, item = await frontend.run_blocking(self._read, await request.body())
        if body.stream:
            return ByteStream(self._lines(item), self._last_words, media_type="application/x-ndjson")
        text = await unless_disconnected(request.receive, self._whole(item))
        return Response(status_code=CLIENT_CLOSED) if text is None else JSONResponse({"text": text})

    def _read(self, data: bytes) -> tuple[Body, GenerateInput]:
        try:
            body = Body.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        ids = self.context.frontend.text.encode(body.prompt, parse_special=False)
        sampling = SamplingParams(**{**self.context.frontend.default_sampling, "max_tokens": body.max_tokens})
        return body, self.context.frontend.check(GenerateInput(ids, sampling))

    async def _whole(self, item: GenerateInput) -> str:
        async with aclosing(self.context.frontend.generate(item)) as deltas:
            return "".join([delta.text async for batch in deltas for delta in batch])

    async def _lines(self, item: GenerateInput) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.context.frontend.generate(item)) as deltas:
            async for batch in deltas:
                for delta in batch:
                    yield json.dumps({"text": delta.text, "done": delta.finish_reason is not None}).encode() + b"\n"

    def _last_words(self, error: Exception) -> bytes:
        message = str(error) if isinstance(error, FwkError) else "internal server error"
        return json.dumps({"error": message}).encode() + b"\n"
