"""A scripted frontend over a byte tokeniser, and the app around the dialect."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
import uvicorn
from fastapi import FastAPI

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import (
    DialectContext,
    EmbedInput,
    Frontend,
    GenerateInput,
    ModelCard,
    OutputDelta,
    TextTools,
)
from fwk.server.app import install_error_handlers
from fwk.types import TokenLogprobs
from fwk.types.sampling import MAX_N, check_token_ids
from fwk_server.openai.dialect import OpenAIDialect

BOS, EOS = 256, 257
SPECIAL = {BOS: "<bos>", EOS: "<eos>"}
VOCAB_SIZE = 258
MAX_MODEL_LEN = 4096


class ByteText(TextTools):
    """Every byte is a token, so that characters of several tokens are common."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        pieces = b"".join(
            b"" if skip_special_tokens and token_id in SPECIAL else self.token_bytes(token_id) for token_id in token_ids
        )
        return pieces.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL[token_id].encode() if token_id in SPECIAL else bytes([token_id])

    def render_chat(
        self, messages, *, tools=None, add_generation_prompt=True, continue_final_message=False, kwargs=None
    ) -> str:
        self.seen = SimpleNamespace(messages=messages, tools=tools, kwargs=kwargs)
        turns = [f"[{message['role']}]{message['content']}" for message in messages]
        return "".join(turns) + ("[assistant]" if add_generation_prompt else "")


Step = list[OutputDelta] | Exception | float
Script = Callable[[GenerateInput], Iterable[Step]]


def score(token_id: int, num_top: int) -> TokenLogprobs:
    """A made-up but reproducible score: the chosen token is the second likeliest."""
    top = [((token_id + 1 + i) % 256, -0.25 - i) for i in range(num_top)]
    return TokenLogprobs(token_id, -0.5 - token_id / 1000, 2, top)


def deltas_of(
    item: GenerateInput,
    text: str,
    *,
    index: int = 0,
    finish: str = "stop",
    stop_reason: str | int | None = None,
    cached_tokens: int = 0,
) -> list[OutputDelta]:
    """One delta per byte; text comes when its character is whole. The last one has the finish reason."""
    deltas, pending = [], b""
    data = text.encode()
    for i, byte in enumerate(data):
        pending += bytes([byte])
        try:
            piece, pending = pending.decode(), b""
        except UnicodeDecodeError:
            piece = ""
        delta = OutputDelta(index, piece, [byte], num_output_tokens=i + 1, cached_tokens=cached_tokens)
        if item.sampling.logprobs is not None:
            delta.logprobs = [score(byte, item.sampling.logprobs)]
        num_top = item.sampling.prompt_logprobs
        if i == 0 and num_top is not None:
            # As the engine does: only the first sequence scores the prompt.
            scored = item.prompt_token_ids[1:] if index == 0 else []
            delta.prompt_logprobs = [None, *(score(token, num_top) for token in scored)]
        deltas.append(delta)
    deltas[-1].finish_reason = finish  # type: ignore[assignment]
    deltas[-1].stop_reason = stop_reason
    return deltas


def interleaved(*sequences: list[OutputDelta]) -> list[list[OutputDelta]]:
    """One step per round, with the next delta of every sequence that still has one."""
    rounds = max(map(len, sequences))
    return [[deltas[i] for deltas in sequences if i < len(deltas)] for i in range(rounds)]


def default_script(item: GenerateInput) -> Iterable[Step]:
    """Each choice says its own text, up to ``max_tokens`` bytes."""
    sequences = []
    for index in range(item.n):
        text = f"Grüße {index} 🙂!"
        full = deltas_of(item, text, index=index, cached_tokens=4)
        limit = item.sampling.max_tokens or len(full)
        if limit < len(full):
            full = full[:limit]
            full[-1].finish_reason = "length"
        sequences.append(full)
    return interleaved(*sequences)


class FakeFrontend(Frontend):
    def __init__(self) -> None:
        self.card = ModelCard("tiny", "org/tiny", 1_700_000_000, MAX_MODEL_LEN, VOCAB_SIZE)
        self.text = ByteText()
        self.default_sampling = {}
        self.params: list[type] = []
        self.script: Script = default_script
        self.items: list[GenerateInput] = []
        self.sources: list[AsyncIterator[list[OutputDelta]]] = []
        self.num_aborted = 0
        self.num_finished = 0
        self.num_blocking = 0
        self.embedded: list[EmbedInput] = []
        self.embed_seconds = 0.0
        self.embed_error: Exception | None = None

    async def run_blocking(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_blocking += 1
        return await asyncio.to_thread(function, *args, **kwargs)

    def check(self, item: GenerateInput) -> GenerateInput:
        item.sampling.check(VOCAB_SIZE)
        if not 1 <= item.n <= MAX_N:
            raise InvalidRequest("n", "n")
        if not item.prompt_token_ids:
            raise InvalidRequest("prompt is empty", "prompt")
        check_token_ids(item.prompt_token_ids, VOCAB_SIZE, "prompt", MAX_MODEL_LEN - 1)
        return item

    def generate(self, item: GenerateInput) -> AsyncIterator[list[OutputDelta]]:
        source = self._generate(item)
        self.sources.append(source)  # so that only closing it ends it, never the garbage collector
        return source

    async def _generate(self, item: GenerateInput) -> AsyncIterator[list[OutputDelta]]:
        self.items.append(item)
        ended = False
        try:
            for step in self.script(item):
                if isinstance(step, Exception):
                    ended = True
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    await asyncio.sleep(0)
                    yield step
            ended = True
        finally:
            self.num_finished += ended
            self.num_aborted += not ended

    def check_embed(self, item: EmbedInput) -> None:
        if not item.token_ids:
            raise InvalidRequest("the input is empty", "input")
        check_token_ids(item.token_ids, VOCAB_SIZE, "input", MAX_MODEL_LEN)

    async def embed(self, items: Sequence[EmbedInput]) -> list[bytes]:
        """Of each input: its length, its first and its last token, and a number float32 cannot hold exactly."""
        self.embedded += items
        try:
            await asyncio.sleep(self.embed_seconds)
            if self.embed_error is not None:
                raise self.embed_error
        except asyncio.CancelledError:
            self.num_aborted += len(items)
            raise
        ids = [item.token_ids for item in items]
        return [struct.pack("<4f", len(tokens), tokens[0], tokens[-1], 0.1) for tokens in ids]

    @property
    def processor_params(self):
        return self.params


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def app(frontend: FakeFrontend) -> FastAPI:
    app = FastAPI()
    dialect = OpenAIDialect(DialectContext(frontend))
    install_error_handlers(app)
    dialect.routes(app)
    dialect.admin_routes(app)
    return app


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
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", ws="none", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await task
    listener.close()


@pytest.fixture
def fake() -> SimpleNamespace:
    """The tools to write scripts with."""
    return SimpleNamespace(
        deltas_of=deltas_of, interleaved=interleaved, score=score, BOS=BOS, EOS=EOS, VOCAB_SIZE=VOCAB_SIZE
    )
