"""The HTTP application: dialects, observers and core's own few routes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from fwk import __version__
from fwk.errors import EngineDead, InvalidRequest, NotServed, RequestFailed
from fwk.interfaces.dialect import Dialect, openai_error
from fwk.interfaces.observer import Observer
from fwk.server.admission import Turnstile
from fwk.server.middleware import Door

log = logging.getLogger(__name__)

PUBLIC_ROUTES = {"/health", "/ready"}
"""Routes that need no key, by their path as declared."""


class ErrorShapes:
    """Which dialect shapes the errors of which route."""

    def __init__(self) -> None:
        self._owner: list[tuple[BaseRoute, Dialect]] = []

    def own(self, routes: Sequence[BaseRoute], dialect: Dialect) -> None:
        self._owner.extend((route, dialect) for route in routes)

    def body(self, scope: Scope, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        for route, dialect in self._owner:
            if route.matches(scope)[0] is not Match.NONE:
                return dialect.error_body(status, message, param, code)
        return openai_error(status, message, param, code)


def build_app(
    dialects: Sequence[Dialect],
    observers: Sequence[Observer],
    *,
    health: Callable[[], str | None],
    degraded: Callable[[], str | None],
    server_info: Callable[[], dict[str, Any]],
    api_key: str | None,
    max_body_bytes: int,
    turnstile: Turnstile,
) -> FastAPI:
    """Put the application together. ``health`` says why nothing is served, ``degraded`` what part is not; or None."""
    app = FastAPI(title="fwk", version=__version__, docs_url=None, redoc_url=None)
    shapes = ErrorShapes()
    add_core_routes(app, health, degraded, server_info, turnstile)
    for dialect in dialects:
        before = len(app.router.routes)
        dialect.routes(app)
        shapes.own(app.router.routes[before:], dialect)
    for observer in observers:
        observer.routes(app)
    install_error_handlers(app, shapes)
    app.add_middleware(
        Door,
        routes=app.router.routes,
        public=PUBLIC_ROUTES,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        turnstile=turnstile,
        error_body=lambda scope, status, message, param: shapes.body(scope, status, message, param, None),
    )
    return app


def add_core_routes(
    app: FastAPI,
    health: Callable[[], str | None],
    degraded: Callable[[], str | None],
    server_info: Callable[[], dict[str, Any]],
    turnstile: Turnstile,
) -> None:
    """/health: whether there is an engine that answers. /ready: whether new requests are taken. /server_info."""

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health_route() -> Response:
        trouble = health()
        if trouble is None:
            reason = degraded()
            return JSONResponse({"status": "ok"} if reason is None else {"status": "degraded", "reason": reason})
        return JSONResponse({"status": "unavailable", "reason": trouble}, 503)

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready_route() -> Response:
        trouble = "the server is stopping" if turnstile.is_closed else health()
        if trouble is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": trouble}, 503)

    @app.get("/server_info")
    async def server_info_route() -> Response:
        return JSONResponse(server_info())


def install_error_handlers(app: FastAPI, shapes: ErrorShapes | None = None) -> None:
    """Every error leaves in the shape of its dialect, and none holds a path, an address or a traceback."""
    body = (shapes or ErrorShapes()).body

    def answer(request: Request, status: int, message: str, param: str | None = None, code: str | None = None) -> Any:
        return JSONResponse(body(request.scope, status, message, param, code), status)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidRequest)
        return answer(request, 400, str(error), error.param)

    async def unreadable(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return answer(request, 400, f"{place}: {first['msg']}" if place else str(first["msg"]), place or None)

    async def dead(request: Request, error: Exception) -> Response:
        response = answer(request, 503, str(error), code="engine_unavailable")
        response.headers["retry-after"] = "5"
        return response

    async def failed(request: Request, error: Exception) -> Response:
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
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("an error nobody foresaw in %s", request.url.path, exc_info=error)
        return answer(request, 500, "internal error")

    app.add_exception_handler(InvalidRequest, invalid)
    app.add_exception_handler(RequestValidationError, unreadable)
    app.add_exception_handler(EngineDead, dead)
    app.add_exception_handler(RequestFailed, failed)
    app.add_exception_handler(NotServed, not_served)
    app.add_exception_handler(StarletteHTTPException, http)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
