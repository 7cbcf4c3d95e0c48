"""A connection between two workers: both prove that they know the secret, and then every piece is signed.

Each side sends ``MAGIC``, the version of the protocol, 32 random bytes and the identity of its K/V; nothing that is
read before the proof is longer. Then each proves that it knows the secret, the one that connects first (HMAC-SHA256
over both hellos). Keys of the connection come from the same, one for each direction; the tag of a piece (BLAKE2b with
that key) covers its number, so that it can be neither forged, nor repeated, nor left out. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

MAGIC = b"fwk-kv\0\0"
PROTOCOL = 1
TAG_BYTES = 16
MAX_MESSAGE_BYTES = 2**24
HELLO_SECONDS = 10.0

_HELLO = struct.Struct("<8sI32s32s")
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")


class WireError(Exception):
    """The transfer cannot be trusted or completed; the sentence says why, and names no address."""


class Wire:
    """One connection. All of it must be over at ``deadline`` (``time.monotonic``)."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self.deadline = deadline
        self._sending = self._receiving = b""
        self._num_sent = self._num_received = 0

    def shake_hands(self, secret: bytes, identity: bytes, *, is_client: bool) -> None:
        """Prove to each other that both know the secret. Raises ``WireError``, ``OSError``."""
        ours = _HELLO.pack(MAGIC, PROTOCOL, secrets.token_bytes(32), identity)
        self._send(ours)
        theirs = bytes(self._exactly(_HELLO.size))
        magic, version, _, identity_of_peer = _HELLO.unpack(theirs)
        if magic != MAGIC:
            raise WireError("the other side is no worker of fwk")
        if version != PROTOCOL:
            raise WireError(f"the other side speaks version {version} of the protocol, this one version {PROTOCOL}")
        both = ours + theirs if is_client else theirs + ours
        client, server = (hmac.digest(secret, side + both, "sha256") for side in (b"client", b"server"))
        if is_client:
            self._send(client)
        found = self._exactly(len(server))
        if not hmac.compare_digest(bytes(found), server if is_client else client):
            raise WireError("the other side has another secret in --disaggregation-token-file")
        if not is_client:
            self._send(server)
        if identity_of_peer != identity.ljust(len(identity_of_peer), b"\0"):
            raise WireError("the other side's K/V are of another model, precision or layout")
        down, up = (hmac.digest(secret, way + both, "sha256") for way in (b"down", b"up"))
        self._sending, self._receiving = (up, down) if is_client else (down, up)

    def send(self, data: bytes | memoryview) -> None:
        """Send a piece whose length the other side knows."""
        tag = _tag(self._sending, self._num_sent, data)
        self._num_sent += 1
        self._send(data)
        self._send(tag)

    def receive_into(self, buffer: memoryview) -> None:
        """Receive a piece of that length. Raises ``WireError`` when it is not as it was sent."""
        self._fill(buffer)
        if not hmac.compare_digest(bytes(self._exactly(TAG_BYTES)), _tag(self._receiving, self._num_received, buffer)):
            raise WireError("what came is damaged, or not from the other side")
        self._num_received += 1

    def send_message(self, data: bytes) -> None:
        """Send a piece of any length up to ``MAX_MESSAGE_BYTES``."""
        self.send(_LENGTH.pack(len(data)))
        self.send(data)

    def receive_message(self) -> bytes:
        """Receive such a piece."""
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length} bytes is longer than allowed")
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)

    def _send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            self._set_timeout()
            view = view[self._connection.send(view) :]

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            self._set_timeout()
            count = self._connection.recv_into(view)
            if not count:
                raise WireError("the other side ended the connection")
            view = view[count:]

    def _set_timeout(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._connection.settimeout(left)


def _tag(key: bytes, number: int, data: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
    digest.update(_NUMBER.pack(number))
    digest.update(data)
    return digest.digest()
