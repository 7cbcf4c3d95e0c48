"""Clients: one that behaves and notes when things came, and raw sockets for those that do not."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import threading
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.helpers.rig import Server, assert_no_leak

SECONDS = 240.0
"""Until a request counts as hung; on a machine that others use, too, an honest one may take long."""


@dataclass(slots=True)
class Streamed:
    """What came of a stream; times are monotonic."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict[int, str])
    token_ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    reasons: dict[int, str] = field(default_factory=dict[int, str])
    errors: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    is_done: bool = False
    ended: float = 0.0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, line: str) -> None:
        """One line of the body."""
        assert_no_leak(line)
        if not line:
            return
        assert not self.is_done, f"after [DONE]: {line}"
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            self.is_done = True
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.errors.append(event["error"])
            return
        assert not self.errors, f"after an error: {line}"
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in self.reasons, f"after the end of choice {index}: {line}"
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]
        self.has_begun.set()


class Client:
    """Talks to one server; every body it reads is searched for what no client may read."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
        """Status and JSON of the reply. ``body`` may be ready bytes."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self._session.post(path, data=data, headers={"content-type": "application/json"}) as reply:
            text = await reply.text()
        assert_no_leak(text)
        return reply.status, json.loads(text)

    async def complete(self, **body: Any) -> list[list[int]]:
        """The token ids of each choice of a greedy request that must succeed."""
        status, reply = await self.post({"temperature": 0, "return_token_ids": True} | body)
        assert status == 200, reply
        return [choice["token_ids"] for choice in reply["choices"]]

    async def refused(self, body: Any, path: str = "/v1/completions") -> dict[str, Any]:
        """The error of a request that must be refused as the client's fault."""
        status, reply = await self.post(body, path)
        assert status == 400, f"{status}: {str(reply)[:300]} for {str(body)[:200]}"
        return reply["error"]

    async def stream(self, streamed: Streamed | None = None, **body: Any) -> Streamed:
        """Stream a completion to its end."""
        result = streamed or Streamed()
        body = {"temperature": 0, "stream": True, "return_token_ids": True} | body
        async with self._session.post("/v1/completions", json=body) as reply:
            result.status = reply.status
            if reply.status == 200:
                async for line in reply.content:
                    result.take(line.decode().rstrip("\n"))
            else:
                text = await reply.text()
                assert_no_leak(text)
                result.errors.append(json.loads(text)["error"])
        result.ended = time.monotonic()
        return result


@contextlib.asynccontextmanager
async def connect(server: Server, key: str | None = None):
    """A client of a server, with a connection per request under way; ``key`` instead of the server's usual one."""
    headers = server.headers if key is None else {"authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector, headers=headers) as session:
        yield Client(session)


async def together(work: Iterable[Awaitable[Any]], seconds: float = SECONDS) -> list[Any]:
    """All of it at once; the first failure is raised when all has ended."""
    results = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), seconds)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def raw_request(body: dict[str, Any], path: str = "/v1/completions", length: int | None = None) -> tuple[bytes, bytes]:
    """Head and body of a POST as they go over the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data) if length is None else length}\r\n\r\n".encode(), data


async def dial(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer(server: Server, *parts: bytes, pause: float = 0.0, ends: bool = False) -> bytes:
    """All that comes back until the server hangs up; ``ends``: the client says that it sends no more."""
    reader, writer = await dial(server)
    reply = b""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        if ends:
            writer.write_eof()
        reply = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert_no_leak(reply.decode("latin-1"))
    return reply


class HealthProbe:
    """Asks for /health all the time, from a thread: how long the slowest answer took bounds the event loop's lag."""

    def __init__(self, server: Server, pause: float = 0.02) -> None:
        self._address = server.url.removeprefix("http://")
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.times: list[float] = []
        self.statuses: set[int] = set()

    @property
    def slowest(self) -> float:
        return max(self.times, default=0.0)

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        while not self._stop.wait(self._pause):
            started = time.monotonic()
            connection.request("GET", "/health")
            reply = connection.getresponse()
            reply.read()
            self.times.append(time.monotonic() - started)
            self.statuses.add(reply.status)
        connection.close()

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
