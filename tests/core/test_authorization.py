"""Who may use which route, decided by the route itself."""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Match, Mount, Route, WebSocketRoute

from fwk.config import ServerOptions
from fwk.interfaces.dialect import Dialect, DialectContext
from fwk.interfaces.observer import Observer, ObserverContext
from fwk.server.app import Reports, build_app
from fwk_http.admission import AdmissionController
from fwk_http.authorization import Access, Guard
from fwk_http.keys import Keys

KEYS = Keys("user", "admin")


async def nothing(*_: Any) -> None:
    """Never called: the guard only looks."""


PUBLIC, USER, ADMIN = (Route(f"/{name}", nothing, methods=["GET"]) for name in ("public", "user", "admin"))
FOLDER = Mount("/folder", routes=[Route("/x", nothing)])
SOCKET = WebSocketRoute("/socket", nothing)


def guard(keys: Keys = KEYS) -> Guard:
    admin = [ADMIN, FOLDER, SOCKET] if keys.admin else []
    return Guard([PUBLIC, USER, *admin, Route("/public", nothing, methods=["POST"])], [PUBLIC], admin, keys)


def opened_by(path: str, method: str = "GET", keys: Keys = KEYS, **more: Any) -> set[str]:
    """Which of no key, the user's and the administrator's opens a path."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []} | more
    given = {"none": b"", "user": b"Bearer user", "admin": b"bearer  admin"}
    return {name for name, header in given.items() if guard(keys).refusal(scope, header) is None}


@pytest.mark.parametrize(
    ("path", "method", "who"),
    [
        ("/public", "GET", {"none", "user", "admin"}),
        ("/public", "HEAD", {"none", "user", "admin"}),
        ("/public", "POST", {"user"}),
        ("/public", "DELETE", {"user"}),
        ("/public/", "GET", {"user"}),
        ("//public", "GET", {"user"}),
        ("/user", "GET", {"user"}),
        ("/nothing", "GET", {"user"}),
        ("/admin", "GET", {"admin"}),
        ("/admin", "POST", {"admin"}),
        ("/folder/x", "GET", {"admin"}),
        ("/folder/nothing", "GET", {"admin"}),
    ],
)
def test_who_is_let_in(path: str, method: str, who: set[str]) -> None:
    assert opened_by(path, method) == who


def test_websockets_are_routes_as_well() -> None:
    assert opened_by("/socket", type="websocket") == {"admin"}
    assert opened_by("/public", type="websocket") == {"user"}


def test_without_keys() -> None:
    everybody = {"none", "user", "admin"}
    assert opened_by("/user", keys=Keys()) == opened_by("/nothing", keys=Keys()) == everybody
    assert opened_by("/user", keys=Keys(admin="admin")) == everybody
    assert opened_by("/admin", keys=Keys(admin="admin")) == {"admin"}
    with pytest.raises(AssertionError, match="without a key of their own"):
        Guard([ADMIN], [], [ADMIN], Keys("user"))


@pytest.mark.parametrize("header", [b"admin", b"Basic admin", b"Bearer", b"Bearer admin2", b"Bearer admi", b"\xff\xfe"])
def test_wrong_keys(header: bytes) -> None:
    scope = {"type": "http", "method": "GET", "path": "/admin", "root_path": "", "headers": []}
    refusal = guard().refusal(scope, header)
    assert refusal is not None
    assert "administrator" in refusal


def test_where_routes_for_administrators_come_from() -> None:
    """From dialects, observers and core, only with a key, and no other route is one of them."""

    class OneDialect(Dialect):
        def routes(self, app: FastAPI) -> None:
            app.add_api_route("/dialect", nothing)

        def admin_routes(self, app: FastAPI) -> None:
            app.add_api_route("/admin/dialect", nothing)

    class OneObserver(Observer):
        def routes(self, app: FastAPI) -> None:
            app.add_api_route("/observer", nothing)

        def admin_routes(self, app: FastAPI) -> None:
            app.add_api_route("/admin/observer", nothing)

    frontend: Any = None

    def build(keys: Keys) -> dict[str, set[str]]:
        app = build_app(
            [OneDialect(DialectContext(frontend))],
            [OneObserver(ObserverContext("tiny"))],
            reports=Reports(lambda: None, lambda: None, dict),
            keys=keys,
            max_body_bytes=1024,
            admission=AdmissionController(ServerOptions(), 100),
            admin_routes=[lambda app: app.add_api_route("/admin/core", nothing)],
        )
        door: Any = app.user_middleware[0].kwargs["guards"][0]
        found: dict[str, set[str]] = {}
        for route in app.router.routes:
            path: str = getattr(route, "path")  # noqa: B009
            scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
            for name, header in (("user", b"Bearer user"), ("admin", b"Bearer admin")):
                if door.refusal(scope, header) is None:
                    found.setdefault(path, set()).add(name)
        return found

    admin = {path for path, who in build(KEYS).items() if who == {"admin"}}
    assert admin == {"/admin/dialect", "/admin/observer", "/admin/core"}
    assert build(KEYS)["/dialect"] == build(KEYS)["/observer"] == {"user"}
    assert not any("admin" in path for path in build(Keys("user")))


class OfHeaders(Route):
    """Matches where a header is given."""

    def matches(self, scope: Any) -> Any:
        return super().matches(scope) if scope["headers"] else (Match.NONE, {})


def test_a_route_that_looks_at_headers_is_asked_each_time() -> None:
    public = Route("/b", nothing)
    one = Guard([OfHeaders("/b", nothing), public], [public], [], KEYS)
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/b", "root_path": "", "headers": []}
    for _ in range(2):
        assert one.refusal(scope, b"") is None
        assert one.refusal(scope | {"headers": [(b"x", b"y")]}, b"") is not None


def test_routes_are_asked_once_for_a_path_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request costs no look at each route; one that comes or goes, or is let to others, is seen by the next."""
    num_asked: Counter[int] = Counter()
    original = Route.matches

    @wraps(original)
    def counted(route: Route, scope: Any) -> Any:
        num_asked[id(route)] += 1
        return original(route, scope)

    monkeypatch.setattr(Route, "matches", counted)
    first, last = Route("/a", nothing, methods=["GET"]), Route("/b", nothing, methods=["GET"])
    routes: list[Any] = [first, last]
    one = Guard(routes, [last], [], KEYS)

    def is_open(path: str, **more: Any) -> bool:
        scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []} | more
        return one.refusal(scope, b"") is None

    assert [is_open("/b") for _ in range(5)] == [True] * 5
    assert num_asked[id(first)] == 1
    assert not is_open("/b", method="POST")
    assert not is_open("/b", root_path="/b")
    assert not any(is_open("/{anything}") or is_open("/c") for _ in range(5))
    assert num_asked[id(first)] == 1 + 2 + 10, "what no route names as it is, is looked up each time"
    one.forget([last])
    assert not is_open("/b")
    one.let([last], Access.PUBLIC)
    assert is_open("/b")
    routes.insert(0, Route("/b", nothing, methods=["GET"]))
    assert not is_open("/b"), "another route answers now"
    routes[0] = Mount("/b", routes=[])
    assert not is_open("/b/")
