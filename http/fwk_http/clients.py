"""For clients of other servers: a reply may hold so many bytes, and must make progress.

All clients read through an ``Allowance``: those that read sockets themselves call it for each piece, those of
http.client have ``pieces_of``, those of httpx ``bound_httpx`` and those of requests ``bound_requests`` do so.
Compressed replies are neither asked for nor read, so what is counted is what the memory holds.
"""

from __future__ import annotations

import http.client
import math
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any

SECONDS = 30.0
"""Which a reply has to begin, and to end when nothing more comes."""

BYTES_PER_SECOND = 1_024
"""What a reply must bring after that on average."""


class BadReply(OSError):
    """A reply that is not read on. The message is a sentence without the reply's own words, and without an address."""


class Allowance:
    """What one reply may still bring, and how long it may still take."""

    def __init__(self, max_bytes: int, seconds: float = SECONDS, bytes_per_second: float = BYTES_PER_SECOND) -> None:
        """seconds: for a reply of no bytes; each brings its share of a second at ``bytes_per_second``."""
        self._max_bytes, self._left = max_bytes, max_bytes
        self._seconds, self._bytes_per_second = seconds, bytes_per_second
        self._start = time.monotonic()

    @property
    def bytes_left(self) -> int:
        """What may still come."""
        return self._left

    @property
    def seconds_left(self) -> float:
        """Until the reply is too slow, if nothing comes; may be negative."""
        received = self._max_bytes - self._left
        return self._start + self._seconds + received / self._bytes_per_second - time.monotonic()

    def take(self, num_bytes: int) -> None:
        """Count what has come. Raises ``BadReply`` when that was too much, or too late."""
        late = self.seconds_left < 0
        self._left -= num_bytes
        if self._left < 0:
            raise BadReply(f"it sent more than {self._max_bytes} bytes")
        if late and math.isinf(self._bytes_per_second):
            raise BadReply(f"it took too long: more than {self._seconds:g} seconds")
        if late:
            raise BadReply(f"it sent less than {self._bytes_per_second:g} bytes a second")


def pieces_of(reply: http.client.HTTPResponse, allowed: Allowance) -> Iterator[bytes]:
    """The body of a reply, as it comes. Raises ``BadReply``; what waits for bytes is bounded by the socket's time."""
    check_encoding(reply.headers)
    while piece := reply.read1(65_536):
        allowed.take(len(piece))
        yield piece


def open_here(request: urllib.request.Request, seconds: float) -> http.client.HTTPResponse:
    """Ask without following where a reply leads: a redirect is an error, as other statuses than 2xx are.

    seconds: which the server may be silent. Raises ``OSError`` and ``http.client.HTTPException``.
    """
    return urllib.request.build_opener(_NoRedirects).open(request, timeout=seconds)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        raise BadReply("it leads elsewhere, where it is not followed")


def bound_httpx(client: Any, allowance: Callable[[Any], Allowance], follows_redirects: bool = False) -> Any:
    """Have every reply of a client of httpx (or httpx2; of either kind) read within ``allowance(reply)``.

    Where redirects are not followed, replies lose their addresses: what is refused is not told where it led.
    Returns the client. Reading raises ``BadReply``.
    """
    httpx: Any = sys.modules[type(client).__mro__[-2].__module__.partition(".")[0]]
    stream = _pieces(httpx)

    def ask(request: Any) -> None:
        request.headers["accept-encoding"] = "identity"

    def bound(reply: Any) -> None:
        check_encoding(reply.headers)
        if not follows_redirects:
            reply.headers.pop("location", None)
        reply.stream = stream(reply.stream, allowance(reply))

    async def ask_async(request: Any) -> None:
        ask(request)

    async def bound_async(reply: Any) -> None:
        bound(reply)

    mine = (ask_async, bound_async) if isinstance(client, httpx.AsyncClient) else (ask, bound)
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], mine[0]],
        "response": [*hooks["response"], mine[1]],
    }
    return client


@cache
def _pieces(httpx: Any) -> Any:
    """The class of a reply's stream that counts."""

    class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __init__(self, inner: Any, allowed: Allowance) -> None:
            self._inner, self._allowed = inner, allowed

        def __iter__(self) -> Iterator[bytes]:
            for piece in self._inner:
                self._allowed.take(len(piece))
                yield piece

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in self._inner:
                self._allowed.take(len(piece))
                yield piece

        def close(self) -> None:
            self._inner.close()

        async def aclose(self) -> None:
            await self._inner.aclose()

    return Pieces


def bound_requests(session: Any, allowance: Callable[[], Allowance]) -> Any:
    """Have every reply of a ``requests.Session`` read whole within ``allowance()``. Returns the session.

    Redirects are refused. Reading raises ``BadReply``.
    """
    from requests.adapters import HTTPAdapter  # noqa: PLC0415 - there only where a session is

    class Adapter(HTTPAdapter):
        def send(self, request: Any, *args: Any, **named: Any) -> Any:
            request.headers["Accept-Encoding"] = "identity"
            allowed = allowance()
            reply = super().send(request, **{**named, "stream": True})
            try:
                check_encoding(reply.headers)
                if reply.is_redirect:
                    raise BadReply("it leads elsewhere, where it is not followed")
                pieces: list[bytes] = []
                while piece := reply.raw.read1(65_536):
                    allowed.take(len(piece))
                    pieces.append(piece)
            finally:
                reply.close()
            reply._content, reply._content_consumed = b"".join(pieces), True
            return reply

    session.mount("http://", Adapter())
    session.mount("https://", Adapter())
    return session


def check_encoding(headers: Any) -> None:
    """Raise ``BadReply`` for a reply whose headers say that it is compressed."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise BadReply("it sent a compressed reply, which was not asked for")
