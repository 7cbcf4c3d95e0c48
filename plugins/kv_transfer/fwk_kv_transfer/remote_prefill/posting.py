"""POST requests to other servers: one connection each, and answers of a bounded size."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

import httptools

from fwk_http.clients import Allowance, BadReply

MAX_ANSWER_BYTES = 2**20
CONNECT_SECONDS = 5.0


class PeerError(Exception):
    """The other server cannot be used; the sentence says why."""


class OrderRefused(PeerError):
    """It computes others."""


class Answer:
    """What came back of an HTTP request: httptools calls its methods."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.status = 0
        self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True


async def post(url: str, path: str, headers: dict[str, str], body: bytes, tls: ssl.SSLContext | None) -> Answer:
    """POST a body on a connection of its own. Raises ``PeerError``, ``OSError``; ``EOFError`` where it ends early."""
    parts = urlsplit(url)
    port = parts.port or (80 if tls is None else 443)
    async with asyncio.timeout(CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
    try:
        head = {"host": parts.netloc, "content-type": "application/msgpack", "connection": "close", **headers}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
        await writer.drain()
        return await _read(reader)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Answer:
    answer = Answer()
    allowed = Allowance(MAX_ANSWER_BYTES, float("inf"))  # each caller has its own deadline
    parser = httptools.HttpResponseParser(answer)
    while not answer.is_whole:
        piece = await reader.read(65536)
        if not piece:
            raise EOFError
        try:
            allowed.take(len(piece))
            parser.feed_data(piece)
        except httptools.HttpParserError:
            raise PeerError("does not answer in HTTP") from None
        except BadReply:
            raise PeerError("sends more than an answer has") from None
    answer.status = parser.get_status_code()
    return answer


def refusal_of(answer: Answer) -> str:
    """Why a server has answered with an error."""
    if answer.status == 401:
        return "has another secret in --disaggregation-token-file"
    if answer.status == 404:
        return "computes no prompts for others: it must be started with --disaggregation-mode prefill"
    return f"refuses ({answer.status})"


def words_of(error: Exception) -> str:
    """What has ended a question, after the name of the server."""
    if isinstance(error, PeerError):
        return str(error)
    if isinstance(error, EOFError):
        return "ended the connection before its answer was whole"
    return f"cannot be reached ({getattr(error, 'strerror', None) or error})"
