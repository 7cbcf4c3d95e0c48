"""The HTTP application: dialects, observers and core's own few routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from fwk import __version__
from fwk.errors import EngineDead, RequestFailed
from fwk.interfaces.dialect import Dialect, openai_error
from fwk.interfaces.observer import Observer
from fwk.server.route_registry import AddRoutes, RouteRegistry
from fwk_http import errors
from fwk_http.admission import AdmissionController
from fwk_http.errors import ErrorBody
from fwk_http.keys import Keys
from fwk_http.listening import shared_with
from fwk_http.middleware import RequestMiddleware

PUBLIC_ROUTES = ("/health", "/ready")
"""Which of core's routes need no key; a dialect names its own (``Dialect.public_paths``)."""


@dataclass(frozen=True, slots=True)
class Reports:
    """What the server says of itself: why nothing is served, what part is not (None: all is well), what runs."""

    health: Callable[[], str | None]
    degraded: Callable[[], str | None]
    server_info: Callable[[], dict[str, Any]]


class Status(BaseModel):
    """What /health and /ready tell: ``ok``, ``degraded`` or ``unavailable``, and why."""

    status: str
    reason: str | None = None


def build_app(
    dialects: Sequence[Dialect],
    observers: Sequence[Observer],
    *,
    reports: Reports,
    keys: Keys,
    max_body_bytes: int,
    admission: AdmissionController,
    admin_routes: Sequence[AddRoutes] = (),
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """Put the application of a server of one model together.

    Its ``state.routes`` are the ``RouteRegistry`` to change it by. ``allowed_origins``: web pages from there may read
    replies. ``admin_routes`` are core's own routes for administrators; like those of dialects and observers they are
    added only if there is a key for them.
    """
    app = unguarded_app(dialects, observers, reports=reports, keys=keys, admission=admission, admin_routes=admin_routes)
    for middleware, settings in _middleware([app.state.routes], max_body_bytes, admission, allowed_origins):
        app.add_middleware(middleware, **settings)
    return app


def unguarded_app(
    dialects: Sequence[Dialect],
    observers: Sequence[Observer],
    *,
    reports: Reports,
    keys: Keys,
    admission: AdmissionController,
    admin_routes: Sequence[AddRoutes] = (),
) -> FastAPI:
    """The same for one of several models: ``guarded`` is put around all of them."""
    app = FastAPI(title="fwk", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    routes = app.state.routes = RouteRegistry(app, keys)
    routes.register("core", lambda app: add_core_routes(app, reports, admission), public=PUBLIC_ROUTES)
    for number, add in enumerate(admin_routes):
        routes.register(f"core {number}", _nothing, add)
    for number, dialect in enumerate(dialects):
        routes.register(
            f"dialect {number}", dialect.routes, dialect.admin_routes, dialect=dialect, public=dialect.public_paths
        )
    for number, observer in enumerate(observers):
        routes.register(f"observer {number}", observer.routes, observer.admin_routes)
    install_error_handlers(app, routes.error_body)
    return app


def guarded(
    app: ASGIApp,
    routes: Sequence[RouteRegistry],
    max_body_bytes: int,
    admission: AdmissionController,
    allowed_origins: Sequence[str],
) -> ASGIApp:
    """What stands before one application, around one that hands requests to several."""
    for middleware, settings in _middleware(routes, max_body_bytes, admission, allowed_origins):
        app = middleware(app, **settings)
    return app


def _middleware(
    routes: Sequence[RouteRegistry],
    max_body_bytes: int,
    admission: AdmissionController,
    allowed_origins: Sequence[str],
) -> list[tuple[Any, dict[str, Any]]]:
    """The innermost first. A request passes if no application of several refuses its key."""

    def error_body(scope: Scope, status: int, message: str, param: str | None) -> dict[str, Any]:
        return routes[0].error_body(scope, status, message, param, None)

    def max_body(path: str) -> int:
        return max(max_body_bytes, *(one.max_body(path) for one in routes))

    guards = [one.guard for one in routes]
    found: list[tuple[Any, dict[str, Any]]] = [
        (
            RequestMiddleware,
            {"guards": guards, "max_body": max_body, "admission": admission, "error_body": error_body},
        )
    ]
    if allowed_origins:  # outermost: a browser asks without a key whether it may ask, and reads errors too
        found.append((CORSMiddleware, shared_with(allowed_origins)))
    return found


def add_core_routes(app: FastAPI, reports: Reports, admission: AdmissionController) -> None:
    """/health: whether there is an engine that answers. /ready: whether new requests are taken. /server_info."""

    probes: dict[int | str, dict[str, Any]] = {
        200: {"model": Status},
        503: {"model": Status, "description": "Nothing can be served."},
    }

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=probes)
    async def health_route() -> Response:
        trouble = reports.health()
        if trouble is None:
            reason = reports.degraded()
            return JSONResponse({"status": "ok"} if reason is None else {"status": "degraded", "reason": reason})
        return JSONResponse({"status": "unavailable", "reason": trouble}, 503)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=probes)
    async def ready_route() -> Response:
        trouble = "the server is stopping" if admission.is_closed else reports.health()
        if trouble is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": trouble}, 503)

    @app.get("/server_info", responses={200: {"model": dict[str, Any]}, 401: {"model": dict[str, Any]}})
    async def server_info_route() -> Response:
        return JSONResponse(reports.server_info())


def _nothing(app: FastAPI) -> None:
    """Routes for administrators alone."""


def _plain(scope: Scope, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    return openai_error(status, message, param, code)


def install_error_handlers(app: FastAPI, body: ErrorBody = _plain) -> None:
    """Every error leaves in the shape of its dialect, and none holds a path, an address or a traceback."""
    errors.install(app, body, unavailable=EngineDead, failed=RequestFailed)
