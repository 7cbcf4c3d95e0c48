"""The routes."""

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


class Parameters(BaseModel):
    """Those of KServe's that fwk has, too; what is left out has the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] | None = None


class Body(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text_input: str
    id: str = ""
    parameters: Parameters = Field(default_factory=Parameters)


class KServeDialect(Dialect):
    """KServe's generate extension over the served model, whatever name the path gives it."""

    def routes(self, app: FastAPI) -> None:
        async def generate(request: Request) -> Response:
            item = await self._read(request)
            text = await unless_disconnected(request.receive, self._whole(item))
            return Response(status_code=CLIENT_CLOSED) if text is None else JSONResponse(self._piece(text))

        async def generate_stream(request: Request) -> Response:
            events = self._events(await self._read(request))
            return ByteStream(events, _last_words, media_type="text/event-stream")

        async def ready() -> Response:
            return JSONResponse({"live": True})

        app.add_api_route("/v2/models/{name}/generate", generate, methods=["POST"], response_model=None)
        app.add_api_route("/v2/models/{name}/generate_stream", generate_stream, methods=["POST"], response_model=None)
        app.add_api_route("/v2/health/ready", ready, methods=["GET"], response_model=None)

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        return {"error": message}

    async def _read(self, request: Request) -> GenerateInput:
        return await self.context.frontend.run_blocking(self._checked, await request.body())

    def _checked(self, data: bytes) -> GenerateInput:
        frontend = self.context.frontend
        try:
            body = Body.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidRequest(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from None
        given = body.parameters.model_dump(exclude_none=True)
        sampling = SamplingParams(**{**frontend.default_sampling, **given})
        return frontend.check(GenerateInput(frontend.text.encode(body.text_input), sampling, label=body.id))

    def _piece(self, text: str) -> dict[str, Any]:
        return {"model_name": self.context.frontend.card.name, "model_version": "1", "text_output": text}

    async def _whole(self, item: GenerateInput) -> str:
        async with aclosing(self.context.frontend.generate(item)) as batches:
            return "".join([delta.text async for batch in batches for delta in batch])

    async def _events(self, item: GenerateInput) -> AsyncGenerator[bytes, None]:
        """An event for each delta. Closing it aborts the request."""
        async with aclosing(self.context.frontend.generate(item)) as batches:
            async for batch in batches:
                for delta in batch:
                    yield _event(self._piece(delta.text))


def _event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _last_words(error: Exception) -> bytes:
    return _event({"error": str(error) if isinstance(error, FwkError) else "internal server error", "text_output": ""})
