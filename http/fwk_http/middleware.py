"""What stands before every route: request ids, the API key, the size of bodies. Plain ASGI."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fwk_errors import NotServed, one_line_traceback
from fwk_http.admission import AdmissionController
from fwk_http.authorization import Guard

log = logging.getLogger(__name__)

MAX_REQUEST_ID = 128
_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID}}}")

current_headers: ContextVar[Mapping[bytes, bytes] | None] = ContextVar("current_headers", default=None)
"""Those of the HTTP request that is answered: of its task, and of what it has begun."""

FREE_METHODS = {"GET", "HEAD", "OPTIONS"}
"""Of requests that only look; they pass however many are served."""

ErrorBody = Callable[[Scope, int, str, str | None], dict[str, Any]]


UNFORESEEN = "internal error"
"""What clients are told of an error that is no answer to their request."""


def log_unforeseen(scope: Scope, error: Exception) -> None:
    """One line for the operator; the traceback is for who debugs."""
    log.error("an error nobody foresaw in %s, answered with 500: %s", scope["path"], one_line_traceback(error))
    log.debug("the error", exc_info=error)


class RequestMiddleware:
    """Lets a request in, or answers it. WebSockets need a key like everything else."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        guards: Sequence[Guard],
        max_body: Callable[[str], int],
        admission: AdmissionController,
        error_body: ErrorBody,
    ) -> None:
        self._app = app
        self._guards = guards
        self._max_body = max_body
        self._admission = admission
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        current_headers.set(headers)
        request_id = _request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        refusal = next((told for guard in self._guards if (told := guard.refusal(scope, given)) is not None), None)
        if refusal is not None:
            await self._refuse(scope, send_with_id, 401, refusal)
            return
        length = headers.get(b"content-length", b"0")
        most = self._max_body(scope["path"])
        if length.isdigit() and int(length) > most:
            message = f"the body is larger than {most} bytes"
            await self._refuse(scope, send_with_id, 413, message)
            return
        if headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
            message = "bodies are read as they are: send it without a Content-Encoding"
            await self._refuse(scope, send_with_id, 415, message)
            return
        if scope["type"] == "websocket" or scope["method"] in FREE_METHODS:
            await self._serve(scope, receive, send_with_id)
            return
        try:
            await self._admission.enter()
        except NotServed as error:
            await self._refuse(scope, send_with_id, error.status, str(error), error.retry_after)
            return
        try:
            await self._serve(scope, receive, send_with_id)
        finally:
            self._admission.leave()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer. What it raises is answered here: further out, it would end the connection,
        which the client may use for its next request already.
        """
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, _limited(receive, self._max_body(scope["path"])), watched)
        except Exception as error:
            if has_begun:
                raise
            log_unforeseen(scope, error)
            await self._refuse(scope, send, 500, UNFORESEEN)

    async def _refuse(
        self,
        scope: Scope,
        send: Send,
        status: int,
        message: str,
        retry_after: int | None = None,
    ) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = orjson.dumps(self._error_body(scope, status, message, None))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if retry_after is not None:
            headers.append((b"retry-after", str(retry_after).encode()))
        if status == 413 or b"expect" in dict(scope["headers"]):  # not told to send, it may not
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _limited(receive: Receive, most: int) -> Receive:
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > most:
                raise NotServed("the body is too large", 413)  # it was sent without a length
        return message

    return limited


def _request_id(given: bytes | None) -> str:
    """The client's id when it is harmless to repeat, else one of ours."""
    if given is not None:
        text = given.decode("latin-1")
        if _ID.fullmatch(text):
            return text
    return uuid.uuid4().hex
