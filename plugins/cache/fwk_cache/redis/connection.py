"""A connection to a Redis server: commands and replies of RESP 2, each within a deadline."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from fwk.errors import ConfigError
from fwk_cache._common.timed_socket import Refused, TimedSocket, WrongReply, WrongSize, tcp, tls, unix

DEFAULT_PORT = 6379
MAX_LINE = 512
"""Bytes of a reply's first line, and of an error's text."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is."""

    host: str
    port: int
    path: str
    is_tls: bool
    database: int

    @property
    def place(self) -> str:
        """For the log."""
        return f"redis at {self.path or f'{self.host}:{self.port}'}"


def read_address(url: str) -> Address:
    """Raises ``ConfigError``."""
    try:
        parts = urlsplit(url)
        port, host = parts.port or DEFAULT_PORT, parts.hostname or ""
        database = int(parts.path.strip("/") or 0) if parts.scheme != "unix" else 0
    except ValueError:
        parts, port, host, database = urlsplit(""), 0, "", 0
    if parts.password is not None:
        raise ConfigError("--hicache-redis-url holds a password, which logs would show: use --hicache-redis-password")
    is_right = host if parts.scheme in ("redis", "rediss") else parts.scheme == "unix" and parts.path
    if not is_right or database < 0:
        raise ConfigError(
            f"--hicache-redis-url {url}: must be redis://HOST:PORT/DATABASE, rediss://HOST:PORT/DATABASE or unix:///PATH"
        )
    path = parts.path if parts.scheme == "unix" else ""
    return Address(host, port, path, parts.scheme == "rediss", database)


class Connection:
    """One caller at a time. Any ``OSError`` but ``Refused`` leaves it of no more use."""

    def __init__(self, address: Address, user: str | None, password: str | None, timeout: float) -> None:
        """Connect, and say who it is. Raises ``OSError``."""
        self._socket = TimedSocket(lambda left: _connect(address, left), timeout)
        self._buffer = b""
        try:
            if password is not None:
                self.command(b"AUTH", *([user.encode()] if user is not None else []), password.encode())
            if address.database:
                self.command(b"SELECT", b"%d" % address.database)
            self.command(b"PING")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def command(self, *words: bytes | memoryview) -> int | bytes | None:
        """Send a command; its reply, if that is no bulk string. Raises ``OSError``."""
        self._send(words)
        return self._reply()

    def fetch(self, key: bytes, head: bytearray, into: memoryview) -> bool:
        """GET an entry into two buffers; False when there is none of their size together. Raises ``OSError``."""
        self._send((b"GET", key))
        line = self._line()
        if line[:1] != b"$":
            raise self._error(line)
        size = _number(line[1:])
        if size == -1:
            return False
        if size != len(head) + len(into):
            raise WrongSize(f"an entry of {size} bytes")
        self._fill(memoryview(head))
        self._fill(into)
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise WrongReply("an entry without an end")
        return True

    def _send(self, words: tuple[bytes | memoryview, ...]) -> None:
        self._socket.begin()
        parts: list[bytes | memoryview] = [b"*%d\r\n" % len(words)]
        for word in words:
            parts += [b"$%d\r\n" % len(word), word, b"\r\n"]
        self._socket.send(parts)

    def _reply(self) -> int | bytes | None:
        line = self._line()
        if line[:1] == b":":
            return _number(line[1:])
        if line[:1] == b"+":
            return line[1:]
        raise self._error(line)

    def _error(self, line: bytes) -> OSError:
        if line[:1] == b"-":
            return Refused(line[1:].decode("ascii", "replace"))
        return WrongReply(f"no reply of the protocol: {line[:40]!r}")

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            if len(self._buffer) > MAX_LINE:
                raise WrongReply("a line without an end")
            self._buffer += self._socket.receive(MAX_LINE)
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _fill(self, into: memoryview) -> None:
        count = min(len(into), len(self._buffer))
        into[:count], self._buffer = self._buffer[:count], self._buffer[count:]
        self._socket.fill(into[count:])


def _connect(address: Address, timeout: float) -> socket.socket:
    if address.path:
        return unix(address.path, timeout)
    return (tls if address.is_tls else tcp)(address.host, address.port, timeout)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise WrongReply(f"no number: {text[:40]!r}") from None
