"""Who may use which route: everybody, whoever has the key, or whoever has the administrator's key."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from enum import Enum
from typing import Any

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from fwk_http.keys import Keys

_BY_PATH = ("starlette.routing", "fastapi.routing")
"""Where routes' ``matches`` are that look at path and method alone; others may look at headers."""


class Access(Enum):
    """Whom a route is for."""

    PUBLIC = "everybody"
    USER = "holders of --api-key or a key of --api-key-file, or everybody when there is none"
    ADMIN = "holders of --admin-api-key"


class Guard:
    """Decides by the route that would answer, never by the text of a path, so no spelling of one gets round it.

    Whatever is on neither list is for users, a path without a route too: what a key protects cannot be probed for.
    Neither key opens what the other does.
    """

    def __init__(
        self, routes: Sequence[BaseRoute], public: Sequence[BaseRoute], admin: Sequence[BaseRoute], keys: Keys
    ) -> None:
        self._routes = routes
        self._routes_then: list[BaseRoute] = []
        self._known: dict[tuple[Any, ...], Access] = {}
        self._access: dict[int, Access] = {}
        self._keys = {
            Access.USER: [key.encode() for key in keys.for_users],
            Access.ADMIN: [keys.admin.encode()] if keys.admin else [],
        }
        self.let(public, Access.PUBLIC)
        self.let(admin, Access.ADMIN)

    def let(self, routes: Sequence[BaseRoute], access: Access) -> None:
        """Say whom routes that are added are for."""
        if routes and access is Access.ADMIN and not self._keys[Access.ADMIN]:
            raise AssertionError("routes for administrators without a key of their own")
        self._access |= {id(route): access for route in routes}
        self._known.clear()

    def forget(self, routes: Sequence[BaseRoute]) -> None:
        """These routes are gone."""
        for route in routes:
            self._access.pop(id(route), None)
        self._known.clear()

    def refusal(self, scope: Scope, authorization: bytes) -> str | None:
        """Why a request may not pass, in a sentence; None when it may."""
        access = self._asked(scope)
        if access is Access.PUBLIC:
            return None
        keys = self._keys[access]
        if not keys and access is Access.USER:
            return None
        scheme, _, given = authorization.partition(b" ")
        # All are compared, so that the time tells nothing of which is the one.
        fits = [hmac.compare_digest(given.strip(), key) for key in keys]
        if any(fits) and scheme.lower() == b"bearer":
            return None
        whose = "the administrator's" if access is Access.ADMIN else "a valid"
        return f"{whose} API key is required: 'Authorization: Bearer KEY', or 'x-api-key: KEY'"

    def _asked(self, scope: Scope) -> Access:
        """Whom the route is for that will answer: the first that matches whole, else the first that does but for the
        method, as the router chooses.

        Remembered for paths that a route names as they are, until a route comes or goes.
        """
        if self._routes != self._routes_then:
            self._routes_then = list(self._routes)
            self._known.clear()
        key = (scope["type"], scope.get("method"), scope["path"], scope.get("root_path", ""))
        found = self._known.get(key)
        return self._looked_up(scope, key) if found is None else found

    def _looked_up(self, scope: Scope, key: tuple[Any, ...]) -> Access:
        partial: BaseRoute | None = None
        is_plain = not key[-1]
        for route in self._routes:
            match, _ = route.matches(scope)
            is_plain = is_plain and isinstance(route, Route) and type(route).matches.__module__ in _BY_PATH
            if match is Match.FULL:
                access = self._access.get(id(route), Access.USER)
                if is_plain and getattr(route, "path", None) == scope["path"]:
                    self._known[key] = access
                return access
            if match is Match.PARTIAL and partial is None:
                partial = route
        access = self._access.get(id(partial), Access.USER)
        return Access.USER if access is Access.PUBLIC else access
