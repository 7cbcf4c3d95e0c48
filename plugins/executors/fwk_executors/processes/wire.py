"""A connection between two machines of a run: both prove that they know the secret, and then every frame is signed.

On connecting, each side sends ``MAGIC``, the version of the protocol and 32 random bytes, and nothing that it receives
before the proof is longer than that. The side that connects proves itself first (HMAC-SHA256 over both sides' random
bytes). Keys of the connection come from the same, one for each direction; a frame has a tag (BLAKE2b with that key)
over its number and its bytes, so that it can be neither forged, nor repeated, nor left out. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from fwk.errors import FwkError
from fwk_executors.processes.messages import Seal

MAGIC = b"fwk-node"
PROTOCOL = 1
HELLO_SECONDS = 10.0
"""For all of the handshake, however it is divided."""

_HELLO = struct.Struct("<8sI32s")

ANOTHER_SECRET = "has another secret in --dist-token-file"

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""A machine that is gone without a word is noticed within 25 seconds."""


class NoPeer(FwkError):
    """The other side is no machine of this run; the sentence says why."""


class NoAnswer(NoPeer):
    """It ended the connection at once, or is silent: another try may find it otherwise."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What signs the frames of a connection, and checks those that come."""

    sending: Seal
    receiving: Seal


def shake_hands(connection: socket.socket, secret: bytes, *, is_leader: bool) -> Keys:
    """Prove to each other that both know the secret. Raises ``NoPeer`` with a sentence that names no address."""
    try:
        return _Handshake(connection, secret).run(is_leader=is_leader)
    except TimeoutError:
        raise NoAnswer(f"did not answer within {HELLO_SECONDS:g} seconds") from None
    except OSError as error:
        raise NoAnswer(f"ended the connection ({error.strerror or error})") from None
    finally:
        with contextlib.suppress(OSError):
            connection.settimeout(None)


class _Handshake:
    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._connection = connection
        self._secret = secret
        self._end = time.monotonic() + HELLO_SECONDS

    def run(self, *, is_leader: bool) -> Keys:
        ours = secrets.token_bytes(32)
        self._send(_HELLO.pack(MAGIC, PROTOCOL, ours))
        magic, version, theirs = _HELLO.unpack(self._receive(_HELLO.size, NoAnswer("ended the connection")))
        if magic != MAGIC:
            raise NoPeer("is no node of fwk")
        if version != PROTOCOL:
            raise NoPeer(
                f"speaks version {version} of the protocol between nodes, and this one version {PROTOCOL}: install the "
                "same fwk on both"
            )
        nonces = ours + theirs if is_leader else theirs + ours
        of_leader, of_follower = self._derive(b"leader" + nonces), self._derive(b"follower" + nonces)
        if not is_leader:
            self._send(of_follower)
        found = self._receive(len(of_leader), NoPeer(ANOTHER_SECRET))
        if not hmac.compare_digest(found, of_follower if is_leader else of_leader):
            raise NoPeer(ANOTHER_SECRET)
        if is_leader:
            self._send(of_leader)
        from_leader, from_follower = Seal(self._derive(b"down" + nonces)), Seal(self._derive(b"up" + nonces))
        return Keys(from_leader, from_follower) if is_leader else Keys(from_follower, from_leader)

    def _derive(self, text: bytes) -> bytes:
        return hmac.new(self._secret, text, hashlib.sha256).digest()

    def _send(self, data: bytes) -> None:
        self._set_timeout()
        self._connection.sendall(data)

    def _receive(self, count: int, otherwise: NoPeer) -> bytes:
        data = b""
        while len(data) < count:
            self._set_timeout()
            part = self._connection.recv(count - len(data))
            if not part:
                raise otherwise
            data += part
        return data

    def _set_timeout(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a machine that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
