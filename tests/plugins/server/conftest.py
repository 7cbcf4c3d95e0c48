"""The app around the dialect, over a scripted frontend."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastapi.routing
import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from tests.helpers.http_app import listening
from tests.helpers.lazy import lazy

from fwk.config import ServerOptions
from fwk.interfaces.dialect import Dialect, DialectContext
from fwk.server.app import Reports, build_app, install_error_handlers
from fwk_http.admission import AdmissionController
from fwk_http.keys import Keys
from fwk_kit.testing.fake_frontend import BOS, EOS, VOCAB_SIZE, FakeFrontend, deltas_of, interleaved, score
from fwk_server.openai.dialect import OpenAIDialect

openai = lazy("openai")


@pytest.fixture(scope="session", autouse=True)
def one_field_for_each_reply() -> Iterator[None]:
    """Each test has an app of its own; of a tenth of a second for it, nine tenths made the same models of replies."""
    real, made = fastapi.routing.create_model_field, dict[Any, Any]()

    def field(name: str, type_: Any, **given: Any) -> Any:
        key = (name, type_, *given.values())
        return made[key] if key in made else made.setdefault(key, real(name, type_, **given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastapi.routing, "create_model_field", field)
        yield


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def dialect(frontend: FakeFrontend) -> Dialect:
    return OpenAIDialect(DialectContext(frontend))


@pytest.fixture
def app(dialect: Dialect) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    dialect.routes(app)
    dialect.admin_routes(app)
    return app


@pytest.fixture
def whole_app() -> Callable[..., FastAPI]:
    """The server's own app around dialects."""

    def make(*dialects: Dialect) -> FastAPI:
        reports = Reports(lambda: None, lambda: None, dict)
        admission = AdmissionController(ServerOptions(), 100)
        return build_app(list(dialects), [], reports=reports, keys=Keys(), admission=admission, max_body_bytes=1 << 20)

    return make


@pytest.fixture
def app_of() -> Callable[[Dialect], FastAPI]:
    """A dialect with errors of its own shape."""

    def make(dialect: Dialect) -> FastAPI:
        app = FastAPI()
        shape = lambda scope, status, message, param, code: dialect.error_body(status, message, param, code)  # noqa: E731
        install_error_handlers(app, shape)
        dialect.routes(app)
        return app

    return make


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to the app in this process; a streamed reply arrives whole."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


class Api:
    """Posts requests; every reply, chunk and error is checked against the published schema on its way."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        schema = json.loads((Path(__file__).parent / "openai_schema.json").read_text())
        self._validators = {
            name: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schema["$defs"]})
            for name in schema["$defs"]
        }

    def check(self, name: str, body: Any) -> Any:
        # An echoed prompt's first token has no score: the one null we send where the schema has none.
        strict = copy.deepcopy(body)
        for choice in strict.get("choices", []):
            scores = choice.get("logprobs") or {}
            if scores.get("token_logprobs", [0])[:1] == [None]:
                scores["token_logprobs"][0], scores["top_logprobs"][0] = 0.0, {}
        self._validators[name].validate(strict)
        return body

    async def post(self, path: str, content: bytes | dict, **kwargs: Any) -> httpx.Response:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"content-type": "application/json"} | kwargs.pop("headers", {})
        return await self._client.post(path, content=data, headers=headers, **kwargs)

    async def get(self, path: str, name: str) -> Any:
        return self.check(name, (await self._client.get(path)).json())

    async def chat(self, **body: Any) -> Any:
        reply = await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]} | body)
        assert reply.status_code == 200, reply.text
        return self.check("ChatCompletion", reply.json())

    async def complete(self, **body: Any) -> Any:
        reply = await self.post("/v1/completions", {"prompt": "Hi"} | body)
        assert reply.status_code == 200, reply.text
        return self.check("Completion", reply.json())

    async def chat_stream(self, **body: Any) -> list[Any]:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True} | body
        return self._chunks(await self.post("/v1/chat/completions", body), "ChatChunk")

    async def complete_stream(self, **body: Any) -> list[Any]:
        reply = await self.post("/v1/completions", {"prompt": "Hi", "stream": True} | body)
        return self._chunks(reply, "CompletionChunk")

    def _chunks(self, reply: httpx.Response, name: str) -> list[Any]:
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = reply.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        for chunk in chunks:
            self.check("Error" if "error" in chunk else name, chunk)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks if "id" in chunk}) <= 1
        return chunks

    async def refused(self, path: str, content: bytes | dict, status: int = 400, **kwargs: Any) -> Any:
        """The ``error`` of a reply that must have this status."""
        reply = await self.post(path, content, **kwargs)
        assert reply.status_code == status, f"{reply.status_code}: {reply.text[:500]}"
        return self.check("Error", reply.json())["error"]


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


@pytest.fixture
async def base_url(app: FastAPI) -> AsyncIterator[str]:
    """A real server on this event loop, for what only real sockets show."""
    async with listening(app, lifespan="off") as url:
        yield url


@pytest.fixture
async def sdk(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="sk-mine", max_retries=0) as client:
        yield client


@pytest.fixture
def fake() -> SimpleNamespace:
    """The tools to write scripts with."""
    return SimpleNamespace(
        deltas_of=deltas_of, interleaved=interleaved, score=score, BOS=BOS, EOS=EOS, VOCAB_SIZE=VOCAB_SIZE
    )
