"""A connection to an LMCache server: messages of ``lmcache_server`` (LMCache 0.3 to 0.5), each within a deadline.

A message is nine int32 in the machine's order, and the server expects a text of 150 bytes after those of a client:

client: command, length, format, dtype, location, four sizes, key
server: code, length, format, dtype, four sizes, location

The bytes of an entry follow the message that has their length. PUT is not answered.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from urllib.parse import urlsplit

from fwk.errors import ConfigError
from fwk_cache._common.timed_socket import TimedSocket, WrongReply, WrongSize, tcp

ASK = struct.Struct("=9i150s")
ANSWER = struct.Struct("=9i")
PUT, GET, EXIST, HEALTH = 1, 2, 3, 5
SUCCESS, FAIL = 200, 400
BINARY, UINT8 = 4, 6
"""The format and the dtype of bytes."""

MAX_ENTRY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is."""

    host: str
    port: int

    @property
    def place(self) -> str:
        """For the log."""
        return f"lmcache at {self.host}:{self.port}"


def read_address(url: str) -> Address:
    """Raises ``ConfigError``."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:
        parts, host, port = urlsplit(""), "", 0
    if parts.scheme != "lm" or not host or not port or parts.path.strip("/") or parts.username is not None:
        raise ConfigError(f"--hicache-lmcache-url {url}: must be lm://HOST:PORT, the address of lmcache_server")
    return Address(host, port)


class Connection:
    """One caller at a time. Any ``OSError`` leaves it of no more use."""

    def __init__(self, address: Address, timeout: float) -> None:
        """Connect, and ask whether it is such a server. Raises ``OSError``."""
        self._socket = TimedSocket(lambda left: tcp(address.host, address.port, left), timeout)
        try:
            self._ask(HEALTH, b"fwk@1@0@0@uint8")
            if self._answer()[0] != SUCCESS:
                raise WrongReply("it is not healthy")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def has(self, key: bytes) -> bool:
        """Whether there is an entry. Raises ``OSError``."""
        self._ask(EXIST, key)
        return self._answer()[0] == SUCCESS

    def put(self, key: bytes, whole: bytes) -> None:
        """Send an entry; whether it is kept, the server does not say. Raises ``OSError``."""
        self._ask(PUT, key, whole)

    def fetch(self, key: bytes, head: bytearray, into: memoryview) -> bool:
        """GET an entry into two buffers; False when there is none. Raises ``OSError``."""
        self._ask(GET, key)
        self._socket.acknowledge_at_once()  # the message and the entry come in two parts
        code, size = self._answer()
        if code == FAIL:
            return False
        if size != len(head) + len(into):
            raise WrongSize(f"an entry of {size} bytes")
        self._socket.fill(memoryview(head))
        self._socket.fill(into)
        return True

    def _ask(self, command: int, key: bytes, data: bytes = b"") -> None:
        self._socket.begin()
        size = len(data)
        self._socket.send([ASK.pack(command, size, BINARY, UINT8, 0, size, 0, 0, 0, key.ljust(150)), data])

    def _answer(self) -> tuple[int, int]:
        """The code, and how many bytes follow."""
        answer = bytearray(ANSWER.size)
        self._socket.fill(memoryview(answer))
        code, size, *_ = ANSWER.unpack(answer)
        if code not in (SUCCESS, FAIL) or size < 0:
            raise WrongReply(f"no reply of the protocol: {bytes(answer[:8]).hex()}")
        return code, size
