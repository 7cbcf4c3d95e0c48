"""A socket whose sends and receives have one deadline for each command, and what can go wrong in a reply."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterable

CLOSED = "the server has closed the connection"


class Refused(OSError):
    """The server answered with an error."""


class WrongReply(OSError):
    """What came is no reply that the command has; nothing else that comes can be trusted."""


class WrongSize(WrongReply):
    """The entry that was asked for has another size; nothing of it was read."""


def tcp(host: str, port: int, timeout: float) -> socket.socket:
    """A connection without a delay before small packets. Raises ``OSError``."""
    connection = socket.create_connection((host, port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def tls(host: str, port: int, timeout: float) -> socket.socket:
    """The same with TLS. Raises ``OSError``."""
    connection = tcp(host, port, timeout)
    return ssl.create_default_context().wrap_socket(connection, server_hostname=host)


def unix(path: str, timeout: float) -> socket.socket:
    """Raises ``OSError``."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


class TimedSocket:
    """One caller at a time. Every method but ``close`` raises ``OSError``."""

    def __init__(self, connect: Callable[[float], socket.socket], timeout: float) -> None:
        """timeout: seconds of a command. The first one, and the connection, begin now."""
        self._timeout = timeout
        self.begin()
        self._socket = connect(timeout)

    def begin(self) -> None:
        """A command begins: what follows is over within the timeout, all of it together."""
        self._deadline = time.monotonic() + self._timeout

    def acknowledge_at_once(self) -> None:
        """Of a TCP connection, until it changes its mind (Linux).

        A server that sends a reply in two parts without ``TCP_NODELAY`` sends the second one when the first is
        acknowledged, which is otherwise put off for 40 ms.
        """
        if hasattr(socket, "TCP_QUICKACK"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        data = memoryview(b"".join(parts))
        while data:
            self._socket.settimeout(self._left())
            data = data[self._socket.send(data) :]

    def receive(self, count: int) -> bytes:
        """At least one byte, at most ``count``."""
        self._socket.settimeout(self._left())
        got = self._socket.recv(count)
        if not got:
            raise ConnectionResetError(CLOSED)
        return got

    def fill(self, into: memoryview) -> None:
        while into:
            self._socket.settimeout(self._left())
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionResetError(CLOSED)
            into = into[count:]

    def close(self) -> None:
        self._socket.close()

    def _left(self) -> float:
        """Seconds until the deadline of all of a command, not of each of its packets."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        return left
