"""What a connection may ask of the server before any route sees a request: sizes and words of heads, and time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fwk_http.heads import head_refusal
from fwk_http.lingering import LingeringTransport

if TYPE_CHECKING:
    from fwk_http.server import Bounds

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024
"""Of a request's line and headers together."""

MAX_HEADERS = 256

KEEPALIVE_SECONDS = 5
"""Between two questions whether a client of HTTP/1.0 is there, which has said that it sends no more."""

_TCP_CLOSE = 7
"""Linux's state of a connection that was reset."""

PROBE_SECONDS = (0.1, 0.5, 2.0)
"""When a client that ended its side of the connection is probed again. Four interim replies in all: some clients take
no more than five.
"""


class _Refused(Exception):
    """Raised inside the parser to stop it."""


class _PatientFlow(FlowControl):
    """What a connection's writer waits on while the client does not read."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        super().__init__(transport)
        self._seconds = seconds

    async def drain(self) -> None:
        try:
            async with asyncio.timeout(self._seconds):  # wait_for loses a cancellation that comes with the event
                await super().drain()
        except TimeoutError:
            log.warning("a client did not read its reply for %g seconds: its connection is closed", self._seconds)
            self._transport.abort()  # not close, which would wait until everything written is read
            await super().drain()  # until the loss of the connection is known to all


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds.

    A request's time runs from its first byte (or from connecting) to its last; the time in which the server itself
    does not read is not the client's.

    What is closed over unread input lingers (``LingeringTransport``). A client that ended only its side of the
    connection gets its reply. ``Upgrade`` is ignored, as HTTP allows: the request is answered in HTTP/1.1.
    """

    bounds: Bounds
    is_retired = False  # of the server, or of this connection
    transport: LingeringTransport  # type: ignore[assignment]
    _timer: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _is_in_head = True
    _is_head_alone = True  # no earlier request ended in the data that came last
    _is_complete = True  # nothing of a request has come that is not whole
    _is_refused = False
    _may_linger = True
    _refusal: tuple[int, str] = (400, "this is not HTTP")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering = LingeringTransport(transport, self._has_unread, self.bounds.write_timeout)
        super().connection_made(lingering)
        self.flow = _PatientFlow(lingering, self.bounds.write_timeout)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_probing()
        self.transport.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.transport.discard(len(data))
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self._is_in_head:
            self._num_head_bytes += len(data) if self._is_head_alone else 0  # else it began somewhere within
            self._is_head_alone = True
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._too_large()
                self.send_400_response("")

    def _parse(self, data: memoryview) -> None:
        """Feed the parser. At a request that asks for another protocol it stops, body unread, and is of no more use:
        another one continues from the same head without the wish.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                with contextlib.suppress(AttributeError):  # httptools before 0.6.3; as uvicorn does
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = (b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return line + b"".join(kept) + b"\r\n"

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It may have gone, or wait for its reply: an interim reply (100) finds out, since
        the system of a client that has gone answers with a reset. Returns whether the connection stays open.

        HTTP/1.0 has none, so that it takes longer to find out there.
        """
        self._may_linger = False
        if self.transport.is_closing():
            return False
        if not self._is_complete:
            self._refusal = 400, "the connection ended before the request did"
            self.send_400_response("")
            return False
        if self.cycle is None or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.1":
            self._probe_client(list(PROBE_SECONDS))
        else:  # knows no interim replies
            self._watch_client()
        return True

    def _watch_client(self) -> None:
        """Have the system ask the client's whether it is still there. One that has gone answers with a reset, at once
        or when it has forgotten the connection, a minute after its end on Linux.
        """
        self._probe = None
        connection = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or connection is None or not hasattr(socket, "TCP_INFO"):
            return
        with contextlib.suppress(OSError):  # no TCP
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_SECONDS)
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
                self.transport.abort()
                return
            self._probe = self.loop.call_later(KEEPALIVE_SECONDS, self._watch_client)

    def _probe_client(self, pauses: list[float]) -> None:
        """Write to a client that may have gone; once its reply has begun, that is the probe."""
        self._probe = None
        if self.transport.is_closing() or self.cycle.response_started or self.pipeline:
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if pauses:
            self._probe = self.loop.call_later(pauses[0], self._probe_client, pauses[1:])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._is_complete, self._num_head_bytes = True, False, 0
        if self._timer is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS or self._head_size() > MAX_HEAD_BYTES:
            self._too_large()
            raise _Refused

    def on_headers_complete(self) -> None:
        method = self.parser.get_method().decode("ascii")
        refusal = head_refusal(self.parser.get_http_version(), method, self.headers, self.bounds.allowed_hosts)
        if refusal is not None:
            self._refusal = refusal
            raise _Refused
        if self.parser.should_upgrade():
            return  # its head is read again, without the wish
        self._is_in_head = False
        super().on_headers_complete()
        if self.is_retired:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_complete, self._is_head_alone = True, False
        self._stop_timer()
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in the shape of all errors; called by the parser's caller as well."""
        status, message = self._refusal
        self._is_refused = True
        is_replying = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not is_replying:  # else nothing can be said in between
            body = self.bounds.error_body(status, message)
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whatever it computes, nobody will get it
            self.cycle.message_event.set()

    def shutdown(self) -> None:
        """The server ends: connections without a request under way are closed, half a head is none."""
        self._may_linger = self.cycle is not None and not self.cycle.response_complete
        super().shutdown()

    @property
    def awaits_request(self) -> bool:
        """Whether a request may be on its way here that the client cannot know to be lost: the connection is new, or
        part of a request has come.
        """
        return not self.transport.is_closing() and (self.cycle is None or not self._is_complete)

    def retire(self) -> None:
        """Another server takes new connections: end this one after its next reply, or now if it rests after one."""
        self.is_retired = True
        if self.cycle is None:
            return  # its first request is on its way
        if not self.cycle.response_complete:
            self.cycle.keep_alive = False
        elif self._is_complete:
            self.transport.close()

    def _has_unread(self) -> bool:
        return self._may_linger and (self._is_refused or not self._is_complete or self.flow.read_paused)

    def _stop_probing(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _too_large(self) -> None:
        sizes = f"{MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
        self._refusal = 431, f"the request's line and headers are larger than {sizes}"

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.bounds.read_timeout, self._time_is_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # it is we who do not read
            self._start_timer()
        elif not self.transport.is_closing():
            self._refusal = 408, f"the request was not sent within {self.bounds.read_timeout:g} seconds"
            self.send_400_response("")


def protocol(bounds: Bounds) -> type[BoundedProtocol]:
    """The protocol with these bounds: uvicorn makes one of each connection by itself."""
    return type("Protocol", (BoundedProtocol,), {"bounds": bounds})
