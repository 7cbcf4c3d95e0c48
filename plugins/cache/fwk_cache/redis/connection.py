"""A connection to a Redis server: commands and replies of RESP 2, each within a deadline."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from fwk.errors import ConfigError

DEFAULT_PORT = 6379
MAX_LINE = 512
"""Bytes of a reply's first line, and of an error's text."""


class Refused(OSError):
    """The server answered with an error."""


class WrongReply(OSError):
    """What came is no reply that the command has; nothing else that comes can be trusted."""


class WrongSize(WrongReply):
    """The entry that was asked for has another size; nothing of it was read."""


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
        self._timeout = timeout
        self._begin()
        self._socket = self._connect(address)
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

    def _connect(self, address: Address) -> socket.socket:
        if address.path:
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(self._left())
            try:
                plain.connect(address.path)
            except OSError:
                plain.close()
                raise
            return plain
        plain = socket.create_connection((address.host, address.port), self._left())
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not address.is_tls:
            return plain
        plain.settimeout(self._left())
        return ssl.create_default_context().wrap_socket(plain, server_hostname=address.host)

    def _send(self, words: tuple[bytes | memoryview, ...]) -> None:
        self._begin()
        parts: list[bytes | memoryview] = [b"*%d\r\n" % len(words)]
        for word in words:
            parts += [b"$%d\r\n" % len(word), word, b"\r\n"]
        data = memoryview(b"".join(parts))
        while data:
            self._socket.settimeout(self._left())
            data = data[self._socket.send(data) :]

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
            self._socket.settimeout(self._left())
            got = self._socket.recv(MAX_LINE)
            if not got:
                raise ConnectionResetError("the server has closed the connection")
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _fill(self, into: memoryview) -> None:
        count = min(len(into), len(self._buffer))
        into[:count], self._buffer = self._buffer[:count], self._buffer[count:]
        into = into[count:]
        while into:
            self._socket.settimeout(self._left())
            got = self._socket.recv_into(into)
            if not got:
                raise ConnectionResetError("the server has closed the connection")
            into = into[got:]

    def _begin(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def _left(self) -> float:
        """Seconds until the deadline of all of a command, not of each of its packets."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        return left


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise WrongReply(f"no number: {text[:40]!r}") from None
