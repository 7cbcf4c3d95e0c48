"""A client of one MCP server, by the ``mcp`` package (the extra ``mcp``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from mcp import Client, MCPError
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from fwk_http.clients import Allowance, bound_httpx

__all__ = ["MCPError", "client_of"]

MAX_REPLY_BYTES = 2 * 2**20
"""Of one reply of a server: a result, all tools, or the events of one connection."""


def bounded(*args: Any, **named: Any) -> Any:
    """The protocol's client of HTTP, whose replies are bounded; how long a call may take bounds their time."""
    return bound_httpx(create_mcp_http_client(*args, **named), lambda _: Allowance(MAX_REPLY_BYTES, float("inf")))


@asynccontextmanager
async def client_of(url: str, token: str | None) -> AsyncGenerator[Client, None]:
    """Connect: by streamable HTTP, or by server-sent events (the protocol's first way) where the path says ``sse``."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    async with AsyncExitStack() as stack:
        if urlsplit(url).path.endswith("/sse"):
            transport = sse_client(url, headers, httpx_client_factory=bounded)
        else:
            http = await stack.enter_async_context(bounded(headers))
            transport = streamable_http_client(url, http_client=http)
        yield await stack.enter_async_context(Client(transport, cache=None))
