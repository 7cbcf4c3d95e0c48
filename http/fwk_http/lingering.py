"""Closing a connection so that its client still reads the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0
"""How long a client that continues sending is read from after the last byte of its reply."""

LINGER_BYTES = 64 * 2**20
"""How much of what it sends is read."""


class LingeringTransport(asyncio.Transport):
    """A transport whose ``close`` waits for a client that may still be sending.

    A socket that is closed over unread bytes is reset by the kernel, and a reset discards what the client has not read
    yet: the reply that says why. So the write side is shut down first; then input is read and discarded until the
    client closes its side, for at most ``LINGER_SECONDS`` and ``LINGER_BYTES``. A reply that is still on its way by
    then has ``write_seconds`` in all.

    ``has_unread`` tells whether there may be input left; if not, ``close`` closes at once.
    """

    def __init__(self, transport: asyncio.Transport, has_unread: Callable[[], bool], write_seconds: float) -> None:
        super().__init__()
        self._transport = transport
        self._has_unread = has_unread
        self._write_seconds = write_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._num_discarded = 0
        self._is_closing = False

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self._transport.is_closing() or not self._transport.can_write_eof() or not self._has_unread():
            self._transport.close()
            return
        self._timer = self._loop.call_later(LINGER_SECONDS, self._time_is_up, self._loop.time() + self._write_seconds)
        self._transport.write_eof()
        self._transport.resume_reading()

    def discard(self, num_bytes: int) -> None:
        """Input that came after ``close``."""
        self._num_discarded += num_bytes
        if self._num_discarded > LINGER_BYTES:
            self._transport.abort()

    def lost(self) -> None:
        """The connection is gone."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()

    def _time_is_up(self, end: float) -> None:
        if self._transport.get_write_buffer_size() and self._loop.time() < end:
            self._timer = self._loop.call_later(LINGER_SECONDS, self._time_is_up, end)
        else:
            self._transport.abort()

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    def pause_reading(self) -> None:
        if not self._is_closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
