"""Errors as replies: each kind's status and headers, in the shape that its route has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match
from starlette.types import Scope

from fwk_errors import InvalidRequest, NotServed, what_is_wrong
from fwk_http.middleware import UNFORESEEN, log_unforeseen

ErrorBody = Callable[[Scope, int, str, str | None, str | None], dict[str, Any]]
"""What makes a reply's body of the request, the status, a message, the field that is wrong, and a code."""


def _allowed(request: Request, status: int) -> dict[str, str]:
    """The header of a 405, with the methods of all routes of the path: the router names those of the first.

    Of a path that some routes name as it is, those that have a name of something in its place are not meant.
    """
    if status != 405:
        return {}
    found = [route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE]
    found = [route for route in found if "{" not in getattr(route, "path", "")] or found
    return {"allow": ", ".join(sorted({method for route in found for method in getattr(route, "methods", ())}))}


def install(app: FastAPI, body: ErrorBody, *, unavailable: type[Exception], failed: type[Exception]) -> None:
    """Every error leaves in the shape of its route, and none holds a path, an address or a traceback.

    unavailable: what stands for a server that can serve nothing now (503). failed: for a request that went wrong (500).
    """

    def answer(request: Request, status: int, message: str, param: str | None = None, code: str | None = None) -> Any:
        return JSONResponse(body(request.scope, status, message, param, code), status)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidRequest)
        return answer(request, 400, str(error), error.param)

    async def unreadable(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        said = what_is_wrong(first)
        return answer(request, 400, f"{place}: {said}" if place else said, place or None)

    async def dead(request: Request, error: Exception) -> Response:
        response = answer(request, 503, str(error), code="engine_unavailable")
        response.headers["retry-after"] = "5"
        return response

    async def went_wrong(request: Request, error: Exception) -> Response:
        return answer(request, 500, str(error))

    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, NotServed)
        response = answer(request, error.status, str(error))
        if error.retry_after is not None:
            response.headers["retry-after"] = str(error.retry_after)
        return response

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        code = getattr(error, "code", None)
        response = answer(request, error.status_code, str(error.detail), getattr(error, "param", None), code)
        response.headers.update(error.headers or {})
        response.headers.update(_allowed(request, error.status_code))
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        log_unforeseen(request.scope, error)
        return answer(request, 500, UNFORESEEN)

    app.add_exception_handler(InvalidRequest, invalid)
    app.add_exception_handler(RequestValidationError, unreadable)
    app.add_exception_handler(unavailable, dead)
    app.add_exception_handler(failed, went_wrong)
    app.add_exception_handler(NotServed, not_served)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
