"""An ASGI app behind a real socket, on the test's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn


@asynccontextmanager
async def listening(app: Any, **config: Any) -> AsyncIterator[str]:
    """The app's address; ``config`` is uvicorn's."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    settings = {"log_level": "error", "ws": "none", "timeout_graceful_shutdown": 1} | config
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await task
    listener.close()
