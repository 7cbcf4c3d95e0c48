"""uvicorn with the bounds of this package."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn

from fwk_http.connection import BoundedProtocol, protocol

KEEPALIVE_SECONDS = 30
"""How long a connection without a request is kept."""

LAST_WORDS_SECONDS = 5
"""What connections get, once all requests have ended or were told to, to take the rest of their replies."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of every connection.

    read_timeout: seconds to send a request, from its first byte to its last. write_timeout: seconds to make room in
    the full buffer of a reply. allowed_hosts: names in Host headers, see ``heads.head_refusal``. error_body: the body
    of a refusal, by status and sentence.
    """

    read_timeout: float
    write_timeout: float
    allowed_hosts: tuple[str, ...] | None
    error_body: Callable[[int, str], bytes]


class HttpServer:
    """Serves an application on a socket that listens; signals are the caller's."""

    def __init__(self, app: Any, bounds: Bounds, tls: ssl.SSLContext | None = None) -> None:
        self._protocol = protocol(bounds)
        settings = uvicorn.Config(
            app,
            http=self._protocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            timeout_keep_alive=KEEPALIVE_SECONDS,
        )
        settings.load()
        settings.ssl = tls
        self._server = uvicorn.Server(settings)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]

    async def serve(self, listener: socket.socket) -> None:
        """Returns once ``stop`` was called and the connections have ended."""
        await self._server.serve(sockets=[listener])

    def retire(self) -> None:
        """Accept no more connections, and end each there is after its next reply."""
        for server in self._server.servers:
            server.close()
        self._protocol.is_retired = True  # those too that were accepted a moment ago, and are not among these yet
        for connection in self._connections():
            connection.retire()

    @property
    def awaits_requests(self) -> bool:
        """Whether a request may still come: on a connection that has not had one, or the rest of one."""
        return any(connection.awaits_request for connection in self._connections())

    def _connections(self) -> list[BoundedProtocol]:
        connections = list(self._server.server_state.connections)
        assert all(isinstance(connection, BoundedProtocol) for connection in connections)
        return connections  # type: ignore[return-value]

    def stop(self) -> None:
        """Accept no more connections, and end those there are."""
        self._server.should_exit = True
