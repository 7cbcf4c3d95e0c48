"""Connections to a port of workers that have not proven yet that they know its secret: few, and not for long."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Generator


class Strangers:
    """At most ``most`` at once: the oldest is ended for the newest, so those that say nothing keep nobody out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: dict[socket.socket, None] = {}  # the oldest first

    def enter(self, connection: socket.socket) -> None:
        """Called where it is accepted, in the order of their coming."""
        with self._lock:
            if len(self._found) >= self._most:
                oldest = next(iter(self._found))
                del self._found[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._found[connection] = None

    @contextlib.contextmanager
    def proving(self, connection: socket.socket) -> Generator[None]:
        """While it proves itself; afterwards it is none of them, and is not ended."""
        try:
            yield
        finally:
            with self._lock:
                self._found.pop(connection, None)
