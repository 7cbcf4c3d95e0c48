"""What ``--also`` and the list ``models`` come to, and where requests go."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from fwk.errors import ConfigError
from fwk.plugins import discover
from fwk.plugins.pools import server_configs
from fwk.server.app import install_error_handlers
from fwk.server.route_registry import RouteRegistry
from fwk_http.keys import Keys
from fwk_pools.on_demand.model_router import ModelRouter


def configs(**given: Any) -> list[Any]:
    return server_configs(discover(), given, print)


def test_common_options_hold_for_all_and_those_of_one_model_do_not() -> None:
    first, second = configs(
        model="A", also=["b=B"], page_size="32", served_model_name="a", eos_id=["7"], enable_lora="true",
        max_loras="2", speculative_algorithm="ngram", host="0.0.0.0",
    )  # fmt: skip
    assert (first.model.model, second.model.model) == ("A", "B")
    assert (first.model.served_model_name, second.model.served_model_name) == (("a",), ("b",))
    assert (first.engine.page_size, second.engine.page_size) == (32, 32)
    assert (first.model.eos_id, second.model.eos_id) == ((7,), ())
    assert first.plugin_options["features.lora"] == {"enable_lora": "true", "max_loras_per_batch": "2"}
    assert "features.lora" not in second.plugin_options
    assert (first.engine.speculative_algorithm, second.engine.speculative_algorithm) == ("ngram", "none")
    assert second.server.host == "0.0.0.0"


def test_a_list_has_options_of_its_own() -> None:
    found = configs(
        page_size=32,
        models=[{"model": "A"}, {"model": "B", "served-model-name": "b", "page-size": 64, "dtype": "half"}],
    )
    assert [(one.model.model, one.engine.page_size, one.model.dtype) for one in found] == [
        ("A", 32, "auto"),
        ("B", 64, "float16"),
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"also": ["B"]}, "--also B: must be NAME=MODEL"),
        ({"models": "A"}, "models must be a list"),
        ({"models": ["A"]}, "each a mapping"),
        ({"models": [{"dtype": "half"}]}, "an entry has no model, only dtype"),
        ({"model": "A", "models": [{"model": "B", "port": 1}]}, "port is for the whole server"),
        ({"model": "A", "models": [{"model": "B", "pagesize": 1}]}, "unknown option"),
        ({"model": "A", "models_memory_limit": 3}, "--models-memory-limit is for several models"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        configs(**given)


class App:
    """Answers with its name what it knows, and with 404 all else."""

    def __init__(self, name: str, knows: str) -> None:
        self.name = name
        self.knows = knows
        self.bodies: list[bytes] = []

    def is_called(self, name: str) -> bool:
        return name == self.name

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"] if scope["method"] == "POST" else b"")
        status = 200 if scope["path"] == self.knows else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode()})


async def sent(method: str, path: str, body: bytes = b"", query: bytes = b"") -> tuple[int, str, list[App]]:
    apps = [App("a", "/x"), App("b", "/y")]
    out: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        out.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": []}
    models: Any = [SimpleNamespace(app=one.app, is_called=one.is_called) for one in apps]
    await ModelRouter(models)(scope, receive, send)
    assert len(out) == 2, "one answer"
    return out[0]["status"], out[1]["body"].decode(), apps


@pytest.mark.parametrize(
    ("method", "path", "body", "query", "expected"),
    [
        ("POST", "/x", b'{"model": "a"}', b"", (200, "a")),
        ("POST", "/x", b'{"model": "b"}', b"", (404, "b")),
        ("POST", "/y", b'{"model": "b"}', b"", (200, "b")),
        ("POST", "/y", b'{"model": "c"}', b"", (404, "a")),
        ("POST", "/y", b"{}", b"", (200, "b")),
        ("POST", "/y", b"no JSON", b"", (200, "b")),
        ("POST", "/y", b'{"model": 3}', b"", (200, "b")),
        ("POST", "/z", b"{}", b"", (404, "a")),
        ("GET", "/x", b"", b"", (200, "a")),
        ("GET", "/y", b"", b"", (200, "b")),
        ("GET", "/x", b"", b"model=b", (404, "b")),
        ("GET", "/z", b"", b"", (404, "a")),
        ("GET", "/x", b"", b"model=c", (404, "the model 'c' is not served here")),
        ("POST", "/x", b'{"model": "a"}', b"model=c", (404, "the model 'c' is not served here")),
    ],
)
async def test_where_a_request_goes(
    method: str, path: str, body: bytes, query: bytes, expected: tuple[int, str]
) -> None:
    status, told, apps = await sent(method, path, body, query)
    assert status == expected[0]
    assert told == expected[1] or expected[1] in told.partition("message")[2], told
    assert all(seen == body for app in apps for seen in app.bodies), "each reads the whole body"


@pytest.mark.parametrize(
    ("method", "body", "query", "status"),
    [
        ("POST", {"model": "a"}, "", 200),
        ("POST", {}, "", 200),
        ("POST", {"model": ""}, "", 200),
        ("POST", {"model": "c"}, "", 404),
        ("POST", {"model": 3}, "", 404),
        ("POST", {"model": "a"}, "?model=c", 404),
        ("POST", None, "?model=c", 404),
        ("GET", None, "?model=c", 404),
        ("GET", None, "?model=a", 200),
        ("POST", {"name": "x" * 70_000}, "", 413),
    ],
)
async def test_an_administrator_can_name_served_models_only(method: str, body: Any, query: str, status: int) -> None:
    done: list[bytes] = []

    def admin(app: FastAPI) -> None:
        @app.api_route("/do", methods=["GET", "POST"])
        async def do(request: Request) -> None:
            done.append(await request.body())

    app = FastAPI()
    routes = RouteRegistry(app, Keys(None, "admin"))
    install_error_handlers(app, routes.error_body)
    routes.is_called = App("a", "").is_called
    routes.register("core", lambda app: None, admin)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        reply = await client.request(method, f"/do{query}", json=body)
    assert reply.status_code == status, reply.text
    assert len(done) == (status == 200)
    if status == 404:
        assert "is not served here: nothing was done" in reply.json()["error"]["message"]
    elif body is not None and done:
        assert json.loads(done[0]) == body


def test_a_file_lists_models(tmp_path: Path) -> None:
    from fwk.cli.common import read_given
    from fwk.cli.serve import _parser

    file = tmp_path / "models.yaml"
    file.write_text("idle-timeout: 60\nmodels:\n  - model: A\n  - {model: B, served-model-name: b}\n")
    plugins, given, _ = read_given(_parser(), ["--config", str(file)])
    found = server_configs(plugins, given, print)
    assert [one.model.model for one in found] == ["A", "B"]
    assert [one.plugin_options["engine_pools.on_demand"]["idle_timeout"] for one in found] == [60, 60]
