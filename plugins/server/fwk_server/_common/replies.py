"""What goes back over HTTP: JSON, event streams, and work that stops when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fwk.errors import EngineDead, InvalidRequest, NotServed, RequestFailed, story

logger = logging.getLogger(__name__)

T = TypeVar("T")
ErrorBody = Callable[[int, str, str | None, str | None], dict[str, Any]]

DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED = 499


def json_response(body: Any, status: int = 200) -> Response:
    """A reply with a JSON body."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def error_event(error: Exception, error_body: ErrorBody) -> bytes:
    """An error after the first byte of a stream; what we did not expect is logged, not told."""
    if isinstance(error, InvalidRequest):
        body = error_body(400, str(error), error.param, None)
    elif isinstance(error, EngineDead):
        body = error_body(503, str(error), None, None)
    elif isinstance(error, NotServed):
        body = error_body(error.status, str(error), None, None)
    elif isinstance(error, RequestFailed):
        body = error_body(500, str(error), None, None)
    else:
        logger.error("a stream failed and ends with an error: %s", story(error))
        logger.debug("the error", exc_info=error)
        body = error_body(500, "internal server error", None, None)
    return event(body)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``, but cancel it as soon as the client is gone (None then)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watcher.cancel()
        task.cancel()
        # The work's own clean-up, which aborts the request in the engine, is over when this returns.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The JSON reply that ``work`` makes."""
    body = await unless_disconnected(request.receive, work)
    return Response(status_code=CLIENT_CLOSED) if body is None else json_response(body)


class EventStream(Response):
    """Server-sent events from a generator of ready bytes, and ``ending`` after the last.

    The status goes out with the first event, so what fails before it is an ordinary HTTP error. The generator is
    closed in every case: at its end, on an error, and at once when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], error_body: ErrorBody, ending: bytes = DONE) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._error_body = error_body
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        try:
            first = await anext(self._events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(first))
            while (chunk := await self._next()) is not None:
                await send(_body(chunk))
            await send({"type": "http.response.body", "body": self._ending, "more_body": False})
        finally:
            await self._events.aclose()

    async def _next(self) -> bytes | None:
        """The next event; an error becomes one, and is the last."""
        try:
            return await anext(self._events, None)
        except Exception as error:
            return error_event(error, self._error_body)


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}
