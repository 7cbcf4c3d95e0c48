"""The application's routes and whose they are: plugins' routes come and go while it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from fwk.errors import ConfigError, NotServed, PluginFault
from fwk.interfaces.dialect import Dialect, openai_error
from fwk.plugins.answers import guarded
from fwk.plugins.discovery import OWN
from fwk_http.authorization import Access, Guard
from fwk_http.bodies import is_form, names_of, read_all, replay
from fwk_http.keys import Keys

_MAX_PATH = 256
_MAX_ADMIN_BODY = 2**16  # a name and a few settings, which FastAPI reads on the event loop
AddRoutes = Callable[[FastAPI], None]


class RouteRegistry:
    """Adds, exchanges and removes the routes of an owner all at once. A request that has its route keeps it."""

    def __init__(self, app: FastAPI, keys: Keys) -> None:
        self._app = app
        self.has_admin = keys.admin is not None
        self.is_called: Callable[[str], bool] | None = None
        """Whether a name is the served model's, once there is one; administrators' requests may name no other."""
        self.guard = Guard(app.router.routes, [], [], keys)
        self._owned: dict[str, list[BaseRoute]] = {}
        self._dialects: dict[str, Dialect] = {}
        self._max_bodies: dict[str, int] = {}

    def register(
        self,
        owner: str,
        add: AddRoutes,
        admin: AddRoutes | None = None,
        *,
        dialect: Dialect | None = None,
        public: Sequence[str] = (),
    ) -> None:
        """Mount an owner's routes, in place of those it has. ``dialect`` shapes their errors.

        ``admin`` adds routes for administrators, who exist only with a key; routes with a path in ``public`` need none.
        Raises ``ConfigError`` when another owner has such a route; then nothing is changed.
        """
        routes = _made(add)
        admins = _made(admin) if admin is not None and self.has_admin else []
        for route in admins:
            if isinstance(route, APIRoute):
                route.app = self._for_served_models(route.app)
        who = getattr(add, "who", "")
        for route in [*routes, *admins] if who and f" ({OWN} " not in who else ():
            if isinstance(route, APIRoute):
                route.app = guarded(who, route.app, route.path)
        self._check(owner, [*routes, *admins])
        self.remove(owner)
        self.guard.let(admins, Access.ADMIN)
        self.guard.let([route for route in routes if getattr(route, "path", None) in public], Access.PUBLIC)
        self._owned[owner] = [*routes, *admins]
        self._app.router.routes.extend(self._owned[owner])
        self._app.openapi_schema = None
        if dialect is not None:
            self._dialects[owner] = dialect
            self._note_bodies()

    def remove(self, owner: str) -> None:
        """Take an owner's routes away, if it has any."""
        gone = self._owned.pop(owner, [])
        if self._dialects.pop(owner, None) is not None:
            self._note_bodies()
        ids = {id(route) for route in gone}
        self._app.router.routes[:] = [route for route in self._app.router.routes if id(route) not in ids]
        self._app.openapi_schema = None
        self.guard.forget(gone)

    def max_body(self, path: str) -> int:
        """Bytes of a body that a dialect takes there, whatever the server's limit is; 0: it says nothing of it."""
        return self._max_bodies.get(path, 0)

    def _note_bodies(self) -> None:
        told = [given for dialect in self._dialects.values() for given in dialect.max_bodies.items()]
        self._max_bodies = dict(sorted(told, key=lambda given: given[1]))

    def error_body(
        self, scope: Scope, status: int, message: str, param: str | None, code: str | None
    ) -> dict[str, Any]:
        """An error in the shape of the dialect whose route was asked for."""
        for match in (Match.FULL, Match.PARTIAL):  # another dialect may have the path for another method
            for owner, dialect in self._dialects.items():
                if any(route.matches(scope)[0] is match for route in self._owned[owner]):
                    with suppress(PluginFault):
                        return dialect.error_body(status, message, param, code)
        if status == 404 and not any(route.matches(scope)[0] is Match.FULL for route in self._app.router.routes):
            told = (dialect.elsewhere.get(scope.get("path", "")) for dialect in self._dialects.values())
            message = next(filter(None, told), None) or self._address_to_use(scope) or message
        return openai_error(status, message, param, code)

    def _for_served_models(self, inner: ASGIApp) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            has_body = scope["method"] not in ("GET", "HEAD") and not is_form(scope)
            messages = await read_all(receive) if has_body else []
            if sum(len(message.get("body", b"")) for message in messages) > _MAX_ADMIN_BODY:
                raise NotServed(f"the body is larger than {_MAX_ADMIN_BODY} bytes", 413)
            for name in names_of(scope, messages):
                if self.is_called is not None and not (isinstance(name, str) and self.is_called(name)):
                    raise NotServed(f"the model {name!r:.200} is not served here: nothing was done", 404)
            await inner(scope, replay(messages, receive), send)

        return app

    def _address_to_use(self, scope: Scope) -> str | None:
        """What a client meant whose base address has ``/v1`` twice, not at all, or behind another prefix."""
        path = scope.get("path", "")
        if len(path) > _MAX_PATH:
            return None
        bare = path.rstrip("/")
        for likely in (bare, f"/v1{bare}", bare[max(bare.rfind("/v1/"), 0) :], bare.removeprefix("/v1")):
            meant = {**scope, "path": likely}
            if likely != path and any(route.matches(meant)[0] is not Match.NONE for route in self._app.router.routes):
                return f"there is nothing at {path}: use {likely} (a client's base address ends in /v1, once)"
        return None

    def _check(self, owner: str, routes: Sequence[BaseRoute]) -> None:
        taken = {place: other for other, own in self._owned.items() if other != owner for place in _places(own)}
        for path, method in _places(routes):
            if (path, method) in taken:
                raise ConfigError(f"{owner} and {taken[path, method]} both answer {method} {path}: use one of them")


def _made(add: AddRoutes) -> list[BaseRoute]:
    """The routes a plugin would add, and for each that answers GET one for HEAD, which HTTP wants of every server."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add(app)
    routes = list(app.router.routes)
    places = _places(routes)
    for route in list(routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()) and (route.path, "HEAD") not in places:
            head = copy(route)
            head.methods = {"HEAD"}
            head.include_in_schema = False
            routes.append(head)
    return routes


def _places(routes: Sequence[BaseRoute]) -> list[tuple[str, str]]:
    return [
        (getattr(route, "path", ""), method)
        for route in routes
        for method in sorted(getattr(route, "methods", None) or {"*"})
    ]
