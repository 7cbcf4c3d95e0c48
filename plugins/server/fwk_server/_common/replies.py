"""What goes back over HTTP: JSON, event streams, and work that stops when the client goes away."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fwk.errors import EngineDead, InvalidRequest, NotServed, RequestFailed, one_line_traceback
from fwk.interfaces.dialect import Frontend
from fwk_http.replies import CLIENT_CLOSED, ByteStream, unless_disconnected
from fwk_server._common import body
from fwk_server._common.body import Model
from fwk_server._common.documented import EVENTS

logger = logging.getLogger(__name__)

T = TypeVar("T")
ErrorBody = Callable[[int, str, str | None, str | None], dict[str, Any]]
Endpoint = Callable[[Request], Awaitable[Response]]

DONE = b"data: [DONE]\n\n"

SMALL_BODY = 2_048
"""Bytes: reading such a body takes less time than handing it to a thread."""


def json_response(value: Any, status: int = 200) -> Response:
    """A reply with a JSON body."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_event(error: Exception, error_body: ErrorBody) -> bytes:
    """An error after the first byte of a stream; what we did not expect is logged, not told."""
    if isinstance(error, InvalidRequest):
        told = error_body(400, str(error), error.param, None)
    elif isinstance(error, EngineDead):
        told = error_body(503, str(error), None, None)
    elif isinstance(error, NotServed):
        told = error_body(error.status, str(error), None, None)
    elif isinstance(error, RequestFailed):
        told = error_body(500, str(error), None, None)
    else:
        logger.error("a stream failed and ends with an error: %s", one_line_traceback(error))
        logger.debug("the error", exc_info=error)
        told = error_body(500, "internal server error", None, None)
    return event(told)


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
    made = await unless_disconnected(request.receive, work)
    return Response(status_code=CLIENT_CLOSED) if made is None else json_response(made)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; raises ``ClientDisconnect`` as soon as the client hangs up."""
    result = await unless_disconnected(request.receive, _boxed(work))
    if result is None:
        raise ClientDisconnect
    return result[0]


async def off_loop(request: Request, frontend: Frontend, function: Callable[..., T], *args: Any) -> T:
    """What ``function`` returns in a thread; raises ``ClientDisconnect`` as soon as the client hangs up."""
    return await unless_gone(request, frontend.run_blocking(function, *args))


async def read_as(
    model: type[Model], request: Request, frontend: Frontend, *, is_any_kind: bool = False
) -> tuple[Model, dict[str, Any]]:
    """A body, checked and as it came: read off the event loop unless it is small. Raises ``InvalidRequest``."""
    data = await body.read(request, is_any_kind=is_any_kind)
    if len(data) <= SMALL_BODY:
        return _checked(model, data)
    return await off_loop(request, frontend, _checked, model, data)


def _checked(model: type[Model], data: bytes) -> tuple[Model, dict[str, Any]]:
    raw = body.parse(data)
    return body.validate(model, raw), raw


async def _boxed(work: Coroutine[Any, Any, T]) -> tuple[T]:
    return (await work,)


class EventStream(ByteStream):
    """Server-sent events from a generator of ready bytes, and ``ending`` after the last."""

    def __init__(self, events: AsyncGenerator[bytes, None], error_body: ErrorBody, ending: bytes = DONE) -> None:
        def last_words(error: Exception) -> bytes:
            return error_event(error, error_body)

        super().__init__(events, last_words, media_type=EVENTS, ending=ending)
