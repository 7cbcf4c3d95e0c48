"""What every HTTP dialect must do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from fwk.errors import EngineDead, NotServed, RequestFailed
from fwk.interfaces.dialect import Dialect, DialectContext, GenerateInput, OutputDelta
from fwk.plugins import Registered
from fwk.server.app import Reports, add_core_routes, install_error_handlers
from fwk.server.route_registry import RouteRegistry
from fwk_http.keys import Keys
from fwk_kit.testing.asgi import Call, Reply, call
from fwk_kit.testing.base import PluginSuite
from fwk_kit.testing.fake_frontend import FakeFrontend, deltas_of, interleaved

TEXT = 'Grüße 🙂, sagte sie; "na ja" \\ <b>\n\t'
"""What the scripted model says: characters of several tokens, and what JSON and HTML must quote."""


class DialectSuite(PluginSuite):
    """The dialect in an application, over a frontend that says what it is told to.

    generates: requests that complete a prompt, each answered in one piece; at least one.
    streams: requests that are answered piece by piece.
    wrong: requests that must be refused with a status from 400 to 499.
    """

    family = "dialects"
    interface = Dialect
    generates: ClassVar[Sequence[Call]] = ()
    streams: ClassVar[Sequence[Call]] = ()
    wrong: ClassVar[Sequence[Call]] = ()

    def text_of(self, call: Call, reply: Reply) -> str | None:
        """The generated text in a whole reply, so that it can be compared; None: it is not looked at. Override it."""
        return None

    def app(self, item: Registered, frontend: FakeFrontend) -> FastAPI:
        """The application with core's own routes and this dialect."""
        app = FastAPI()
        routes = RouteRegistry(app, Keys())
        dialect: Dialect = self.make(item, DialectContext(frontend, self.given(item)))
        routes.register(item.name, dialect.routes, dialect=dialect)
        install_error_handlers(app, routes.error_body)
        return app

    def run(self, item: Registered, request: Call, script: Any = None, hang_up_after: int | None = None) -> Any:
        """Send one request to a fresh application: the frontend and the reply."""
        frontend = FakeFrontend()
        frontend.script = script or (
            lambda given: interleaved(*(deltas_of(given, TEXT, index=i) for i in range(given.n)))
        )

        async def main() -> Reply:
            reply = await call(self.app(item, frontend), request, hang_up_after)
            for _ in range(20):
                await asyncio.sleep(0)
            return reply

        return frontend, asyncio.run(main())

    def all_generating(self) -> list[Call]:
        """Every request that runs a prompt, or a skip."""
        found = [*self.generates, *self.streams]
        if not found:
            pytest.skip("the suite names no requests: set generates and streams")
        return found

    def exercise(self, item: Registered) -> None:
        self.app(item, FakeFrontend())

    def test_routes_are_its_own(self, item: Registered) -> None:
        """It adds routes, none of them core's, none twice."""
        plain, core = FastAPI(), FastAPI()
        add_core_routes(core, Reports(_nothing, _nothing, dict), None)  # type: ignore[arg-type]
        given = set(_routes(plain))
        mine = [route for route in _routes(self.app(item, FakeFrontend())) if route not in given]
        assert mine, "routes() added no route"
        assert len(mine) == len(set(mine)), "a route is added twice"
        assert not set(mine) & set(_routes(core)), "a route of core is taken"

    def test_answers(self, item: Registered) -> None:
        for request in self.all_generating():
            frontend, reply = self.run(item, request)
            assert reply.status == 200, f"{request.path}: {reply.status} {reply.body[:300]!r}"
            assert reply.is_whole
            assert frontend.items, f"{request.path} ran nothing"
            text = self.text_of(request, reply)
            assert text is None or TEXT in text, f"{request.path}: the model's text came back as {text!r}"

    def test_streams_come_in_pieces(self, item: Registered) -> None:
        if not self.streams:
            pytest.skip("the suite names no streamed requests: set streams")
        for request in self.streams:
            _, reply = self.run(item, request)
            assert len(reply.pieces) > 2, f"{request.path} holds its stream back until the end"

    def test_a_prompt_is_checked_and_tokenised_off_or_on_the_loop(self, item: Registered) -> None:
        """What reaches the engine is ids in range and settings that were checked."""
        for request in self.all_generating():
            frontend, _ = self.run(item, request)
            for given in frontend.items:
                assert isinstance(given, GenerateInput)
                frontend.check(given)

    def test_a_client_that_hangs_up_aborts_its_request(self, item: Registered) -> None:
        """Before the first token and after it: the frontend's generator is closed, at once."""

        def endless(given: GenerateInput) -> Any:
            yield 0.05
            for delta in deltas_of(given, "a" * 10_000):
                yield [delta]

        for request in self.all_generating():
            for pieces in (0, 1) if request in self.streams else (0,):
                frontend, _ = self.run(item, request, endless, hang_up_after=pieces)
                assert frontend.num_aborted == len(frontend.items) > 0, (
                    f"{request.path}: hung up after {pieces} pieces, and the request runs on"
                )

    def test_failures_have_the_right_status(self, item: Registered) -> None:
        failures = [(EngineDead("the engine stopped"), 503), (NotServed("too many", 429), 429)]
        for error, status in failures:
            for request in self.generates:
                _, reply = self.run(item, request, lambda given, error=error: [error])
                assert reply.status == status, f"{request.path}: {type(error).__name__} is answered with {reply.status}"
                assert reply.json(), "an error without a body"
        for request in self.generates:
            _, reply = self.run(item, request, lambda given: [RequestFailed("it failed")])
            assert reply.status >= 400, f"{request.path}: a failed request is answered with {reply.status}"

    def test_a_failure_inside_a_stream_is_told(self, item: Registered) -> None:
        """What the client got before stays; then comes word of the failure, and an end."""

        def breaks(given: GenerateInput) -> Any:
            yield from ([delta] for delta in deltas_of(given, "abc")[:2])
            yield RequestFailed("the lamp went out")

        for request in self.streams:
            _, reply = self.run(item, request, breaks)
            assert reply.is_whole, f"{request.path}: the stream has no end"
            assert b"the lamp went out" in reply.body, f"{request.path}: the client is not told of the failure"

    def test_what_nobody_foresaw_is_not_told(self, item: Registered) -> None:
        """An error of ours may hold paths and prompts: clients hear that there was one."""
        for request in self.streams:
            _, reply = self.run(
                item, request, lambda given: [*([d] for d in deltas_of(given, "abc")[:2]), KeyError("/secret")]
            )
            assert b"/secret" not in reply.body

    def test_wrong_requests_are_refused(self, item: Registered) -> None:
        posts = {request.path for request in self.all_generating() if request.method == "POST"}
        broken = [Call("POST", path, body) for path in sorted(posts) for body in (b"{", b"[]", b"\xff\xfe", b'"text"')]
        for request in [*self.wrong, *broken]:
            frontend, reply = self.run(item, request)
            assert 400 <= reply.status < 500, (
                f"{request.path} {request.data[:80]!r}: {reply.status} {reply.body[:200]!r}"
            )
            assert isinstance(reply.json(), dict), "a refusal without a JSON body"
            assert not frontend.items, "something ran before the request was refused"

    def test_errors_are_shaped_as_json(self, item: Registered) -> None:
        dialect: Dialect = self.make(item, DialectContext(FakeFrontend(), self.given(item)))
        for status in (400, 401, 404, 429, 500, 503):
            body = dialect.error_body(status, "a word", "field", None)
            assert isinstance(body, dict)
            assert "a word" in str(body)

    def test_two_applications_do_not_share(self, item: Registered) -> None:
        for request in self.all_generating()[:1]:
            one, _ = self.run(item, request)
            two, _ = self.run(item, request)
            assert len(one.items) == len(two.items)


def _says_the_text(given: GenerateInput) -> list[list[OutputDelta]]:
    return interleaved(*(deltas_of(given, TEXT, index=index) for index in range(given.n)))


def _routes(app: FastAPI) -> list[tuple[str, str]]:
    """Paths and methods."""
    found = [route for route in app.router.routes if isinstance(route, Route)]
    return [(route.path, method) for route in found for method in sorted(route.methods or ())]


def _nothing() -> None:
    return None
