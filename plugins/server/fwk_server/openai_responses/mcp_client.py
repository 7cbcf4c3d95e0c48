"""A client of one MCP server, by the ``mcp`` package (the extra ``mcp``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

from mcp import Client, MCPError
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

__all__ = ["MCPError", "client_of"]


@asynccontextmanager
async def client_of(url: str, token: str | None) -> AsyncGenerator[Client, None]:
    """Connect: by streamable HTTP, or by server-sent events (the protocol's first way) where the path says ``sse``."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    async with AsyncExitStack() as stack:
        if urlsplit(url).path.endswith("/sse"):
            transport = sse_client(url, headers)
        else:
            http = await stack.enter_async_context(create_mcp_http_client(headers))
            transport = streamable_http_client(url, http_client=http)
        yield await stack.enter_async_context(Client(transport, cache=None))
