"""What goes back over HTTP: JSON, event streams, and work that stops when the client goes away."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fwk.errors import EngineDead, InvalidRequest, NotServed, RequestFailed, one_line_traceback
from fwk_http.replies import CLIENT_CLOSED, ByteStream, unless_disconnected
from fwk_server._common.documented import EVENTS

logger = logging.getLogger(__name__)

T = TypeVar("T")
ErrorBody = Callable[[int, str, str | None, str | None], dict[str, Any]]
Endpoint = Callable[[Request], Awaitable[Response]]

DONE = b"data: [DONE]\n\n"


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
        logger.error("a stream failed and ends with an error: %s", one_line_traceback(error))
        logger.debug("the error", exc_info=error)
        body = error_body(500, "internal server error", None, None)
    return event(body)


def closed_on_disconnect(endpoint: Endpoint) -> Endpoint:
    """The endpoint, which answers ``CLIENT_CLOSED`` where it raises ``ClientDisconnect``."""

    async def route(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)

    return route


async def reply(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The JSON reply that ``work`` makes."""
    body = await unless_disconnected(request.receive, work)
    return Response(status_code=CLIENT_CLOSED) if body is None else json_response(body)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; raises ``ClientDisconnect`` as soon as the client hangs up."""
    result = await unless_disconnected(request.receive, _boxed(work))
    if result is None:
        raise ClientDisconnect
    return result[0]


async def _boxed(work: Coroutine[Any, Any, T]) -> tuple[T]:
    return (await work,)


class EventStream(ByteStream):
    """Server-sent events from a generator of ready bytes, and ``ending`` after the last."""

    def __init__(self, events: AsyncGenerator[bytes, None], error_body: ErrorBody, ending: bytes = DONE) -> None:
        def last_words(error: Exception) -> bytes:
            return error_event(error, error_body)

        super().__init__(events, last_words, media_type=EVENTS, ending=ending)
