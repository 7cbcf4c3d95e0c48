"""What a connection may ask of the server before any route sees a request: sizes of heads, and time."""

from __future__ import annotations

import asyncio
import logging

import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fwk.interfaces.dialect import openai_error

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024
"""Of a request's line and headers together."""

MAX_HEADERS = 256


class _HeadTooLarge(Exception):
    """Raised inside the parser to stop it."""


class _PatientFlow(FlowControl):
    """What a connection's writer waits on while the client does not read."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        super().__init__(transport)
        self._seconds = seconds

    async def drain(self) -> None:
        try:
            await asyncio.wait_for(super().drain(), self._seconds)
        except TimeoutError:
            log.warning("a client did not read its reply for %g seconds: its connection is closed", self._seconds)
            self._transport.abort()  # not close, which would wait until everything written is read
            await super().drain()  # until the loss of the connection is known to all


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds.

    Clients have ``read_timeout`` seconds to send a request, from its first byte (or from connecting) to its last; the
    time in which the server itself does not read is not theirs. They have ``write_timeout`` seconds to make room in
    the full buffer (64 KB) of their reply.
    """

    read_timeout: float
    write_timeout: float
    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _is_in_head = True
    _refusal: tuple[int, str] = (400, "this is not HTTP")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PatientFlow(transport, self.write_timeout)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._too_large()
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        if self._timer is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS or self._head_size() > MAX_HEAD_BYTES:
            self._too_large()
            raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in the shape of all errors; called by the parser's caller as well."""
        status, message = self._refusal
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # a reply is on its way: nothing can be said in between
            return
        body = orjson.dumps(openai_error(status, message))
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _too_large(self) -> None:
        sizes = f"{MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
        self._refusal = 431, f"the request's line and headers are larger than {sizes}"

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.read_timeout, self._time_is_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # it is we who do not read
            self._start_timer()
        elif not self.transport.is_closing():
            self._refusal = 408, f"the request was not sent within {self.read_timeout:g} seconds"
            self.send_400_response("")


def protocol(read_seconds: float, write_seconds: float) -> type[BoundedProtocol]:
    """The protocol with these timeouts: uvicorn makes one of each connection by itself."""

    class Protocol(BoundedProtocol):
        read_timeout = read_seconds
        write_timeout = write_seconds

    return Protocol
