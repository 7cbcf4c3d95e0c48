"""Call an ASGI application as a server does: whole replies, and clients that hang up in the middle."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

SECONDS = 20.0
"""No reply of an application over a scripted frontend takes that long."""


@dataclass(slots=True)
class Reply:
    """What came back; ``pieces`` as they were sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    pieces: list[bytes] = field(default_factory=list[bytes])
    is_whole: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def json(self) -> Any:
        """The body as JSON. Raises ``ValueError``."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request; a ``body`` that is not bytes is sent as JSON."""

    method: str
    path: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)

    @property
    def data(self) -> bytes:
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


async def call(app: Any, request: Call, hang_up_after: int | None = None) -> Reply:
    """Send a request. The client hangs up once ``hang_up_after`` pieces of the body have come."""
    reply, gone = Reply(), asyncio.Event()
    messages = [{"type": "http.request", "body": request.data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in message.get("headers", [])}
        elif message["type"] == "http.response.body":
            if message.get("body"):
                reply.pieces.append(message["body"])
            reply.is_whole = not message.get("more_body", False)
            if hang_up_after is not None and len(reply.pieces) >= hang_up_after:
                gone.set()

    if hang_up_after == 0:
        asyncio.get_running_loop().call_later(0.05, gone.set)
    path, _, query = request.path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in request.headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await asyncio.wait_for(app(scope, receive, send), SECONDS)
    return reply
