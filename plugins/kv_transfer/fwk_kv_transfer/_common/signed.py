"""What transports of K/V have in common: one signed connection for each transfer, by which its ends agree on it.

Threads send and receive, the worker's own thread only starts and polls. How the bytes of blocks go is left to each
transport: over the connection itself, or from memory to memory while it is held.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np
import torch

from fwk.errors import ConfigError
from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext, Transfer
from fwk_http.strangers import Strangers
from fwk_kv_transfer._common.wire import HELLO_SECONDS, Wire, WireError

PIECE_BYTES = 4 * 2**20
"""Blocks are sent and signed in pieces of about this size; one block at least."""

MAX_RECEPTIONS = 8
MAX_CONNECTIONS = 64
CONNECT_SECONDS = 5.0
MAX_PORT = 65535
PROOF_SECONDS = 1.0
"""In which a connection must prove that it knows the secret."""


class Wanted(msgspec.Struct, frozen=True):
    """What the receiver asks for: places of an offer; none to end it unread."""

    key: str
    places: list[int]
    transport: str = "tcp"


class Answer(msgspec.Struct, frozen=True):
    """Whether the blocks follow, each of ``block_bytes``, or why not."""

    block_bytes: int = 0
    error: str = ""


@dataclass(eq=False)
class Job:
    """An offer or a reception. ``connection``: while a thread works on it."""

    key: str
    block_ids: np.ndarray
    deadline: float
    connection: socket.socket | None = None
    is_stopped: bool = False
    future: Future[None] | None = field(default=None)

    def check(self) -> None:
        """Raises ``WireError`` once it was cancelled."""
        if self.is_stopped:
            raise WireError("it was cancelled")


class Blocks:
    """The KV cache as rows of bytes, one a block: all its layers, one after another.

    layers: of each, [num_blocks, bytes of a block] uint8; they share memory with the caches.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self.layers: list[np.ndarray] = [cache.view(cache.shape[0], -1).view(torch.uint8).numpy() for cache in caches]
        self.num_blocks = len(self.layers[0]) if self.layers else 0
        self.block_bytes = sum(layer.shape[1] for layer in self.layers)
        self.per_piece = max(1, PIECE_BYTES // max(self.block_bytes, 1))

    def read(self, ids: np.ndarray) -> np.ndarray:
        """[len(ids), block_bytes]"""
        return np.concatenate([layer[ids] for layer in self.layers], axis=1)

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        start = 0
        for layer in self.layers:
            end = start + layer.shape[1]
            layer[ids] = rows[:, start:end]
            start = end


class SignedTransfer(KVTransfer):
    """Those who know the secret read offers; a connection serves one transfer.

    A transport implements ``lend`` and ``fetch``.
    """

    transport: ClassVar[str]
    """Its name: both sides must have the same."""

    def __init__(self, context: KVTransferContext) -> None:
        super().__init__(context)
        self._blocks = Blocks(context.kv_caches)
        self._lock = threading.Lock()
        self._offers: dict[str, Job] = {}
        self._receptions: dict[str, Job] = {}
        self._ended: list[Transfer] = []
        self._listener: socket.socket | None = None
        self._strangers = Strangers(MAX_CONNECTIONS)
        self._num_proven = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._connections: set[socket.socket] = set()
        self._threads = ThreadPoolExecutor(MAX_RECEPTIONS, thread_name_prefix="fwk-kv-receive")
        self._is_closed = False

    def address(self) -> bytes:
        if self._listener is None:
            self._listener = self._listen()
            threading.Thread(target=self._accept, args=(self._listener,), name="fwk-kv-accept", daemon=True).start()
        host, port = self._listener.getsockname()[:2]
        return msgspec.msgpack.encode((host, port))

    def _listen(self) -> socket.socket:
        options = self.context.options
        host, port = options.disaggregation_transfer_host, options.disaggregation_bootstrap_port
        port += self.context.rank if port else 0
        if port > MAX_PORT:
            raise ConfigError(
                f"--disaggregation-bootstrap-port {port - self.context.rank} leaves no port for each worker and each "
                f"number of ranks that reads: begin {port - MAX_PORT} or more below"
            )
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(place[:2], family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise ConfigError(
                f"a worker cannot listen at {host}:{port} (--disaggregation-transfer-host, "
                f"--disaggregation-bootstrap-port): {error.strerror or error}"
            ) from None

    # Offers.

    def offer(self, key: str, block_ids: Sequence[int], deadline: float) -> None:
        with self._lock:
            assert key not in self._offers, f"{key} is offered already"
            self._offers[key] = Job(key, np.array(block_ids, np.int64), deadline)

    def withdraw(self, key: str) -> None:
        with self._lock:
            job = self._offers.get(key)
            if job is not None:
                self._stop(self._offers, job, "it was withdrawn")

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._strangers.enter(connection)
            threading.Thread(target=self._serve, args=(connection,), name="fwk-kv-send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            with connection:
                wire = self._proven(connection)
                if self._num_proven.acquire(blocking=False):
                    try:
                        self._answer(connection, wire)
                    finally:
                        self._num_proven.release()
        except (WireError, OSError, msgspec.DecodeError, ValueError):
            pass  # a stranger, or a receiver that is gone: what it was reading has ended with it
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _proven(self, connection: socket.socket) -> Wire:
        with self._strangers.proving(connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = Wire(connection, time.monotonic() + PROOF_SECONDS)
            wire.shake_hands(self.context.secret, self._identity, is_client=False)
        wire.deadline = time.monotonic() + HELLO_SECONDS
        return wire

    def _answer(self, connection: socket.socket, wire: Wire) -> None:
        wanted = msgspec.msgpack.decode(wire.receive_message(), type=Wanted)
        if wanted.transport != self.transport:
            why = f"--disaggregation-transfer-backend is {self.transport} there, {wanted.transport} here"
            wire.send_message(msgspec.msgpack.encode(Answer(error=why)))
            return
        with self._lock:
            job = self._offers.get(wanted.key)
            if job is not None and job.connection is None and not job.is_stopped:
                job.connection = connection
            else:
                job = None
        if job is None:
            wire.send_message(msgspec.msgpack.encode(Answer(error="there is no such offer, or not any more")))
            return
        wire.deadline = job.deadline
        started, error, num_bytes = time.monotonic(), "", 0
        try:
            num_bytes = self._send_blocks(wire, job, wanted.places)
        except Exception as found:  # of any kind: the offer has ended
            error = _words(found)
        self._end(self._offers, job, error, num_bytes, started)

    def _send_blocks(self, wire: Wire, job: Job, places: list[int]) -> int:
        if any(not 0 <= place < len(job.block_ids) for place in places):
            wire.send_message(msgspec.msgpack.encode(Answer(error="the offer has fewer blocks")))
            raise WireError("blocks were asked for that are not in the offer")
        wire.send_message(msgspec.msgpack.encode(Answer(self._blocks.block_bytes)))
        ids = job.block_ids[places]
        if places:
            self.lend(wire, ids)
        wire.receive_message()  # it has them all
        return len(ids) * self._blocks.block_bytes

    @abstractmethod
    def lend(self, wire: Wire, ids: np.ndarray) -> None:
        """Send blocks, or what the other side needs to read them; it says when it has them."""

    # Receptions.

    def receive(self, peer: bytes, key: str, places: Sequence[int], block_ids: Sequence[int], deadline: float) -> None:
        assert len(places) == len(block_ids), "a block for each place"
        job = Job(key, np.array(block_ids, np.int64), deadline)
        with self._lock:
            assert key not in self._receptions, f"{key} is being received already"
            self._receptions[key] = job
            job.future = self._threads.submit(self._receive, job, peer, list(places))

    def cancel(self, key: str) -> None:
        with self._lock:
            job = self._receptions.get(key)
            if job is not None:
                self._stop(self._receptions, job, "it was cancelled")

    def _receive(self, job: Job, peer: bytes, places: list[int]) -> None:
        started, error, num_bytes = time.monotonic(), "", 0
        try:
            with self._connect(job, peer) as connection:
                num_bytes = self._receive_blocks(Wire(connection, job.deadline), job, places)
        except Exception as found:  # of any kind: the reception has ended
            error = _words(found)
        self._end(self._receptions, job, error, num_bytes, started)

    def _connect(self, job: Job, peer: bytes) -> socket.socket:
        host, port = msgspec.msgpack.decode(peer, type=tuple[str, int])
        left = job.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        try:
            connection = socket.create_connection((host, port), min(left, CONNECT_SECONDS))
        except OSError as error:  # the address is what the operator of the other side may have to change
            raise WireError(f"nothing can be reached at {host}:{port} ({error.strerror or error})") from None
        with self._lock:
            job.connection = connection
            if job.is_stopped or self._is_closed:
                connection.close()
                raise WireError("it was cancelled")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _receive_blocks(self, wire: Wire, job: Job, places: list[int]) -> int:
        wire.shake_hands(self.context.secret, self._identity, is_client=True)
        wire.send_message(msgspec.msgpack.encode(Wanted(job.key, places, self.transport)))
        answer = msgspec.msgpack.decode(wire.receive_message(), type=Answer)
        size = self._blocks.block_bytes
        if answer.error or answer.block_bytes != size:
            raise WireError(answer.error or f"blocks have {answer.block_bytes} bytes there, {size} here")
        if places:
            self.fetch(wire, job)
        wire.send_message(b"")
        return len(places) * size

    @abstractmethod
    def fetch(self, wire: Wire, job: Job) -> None:
        """Receive all blocks of a reception; ``Job.check`` between pieces. Raises what ends it."""

    # Both.

    @property
    def _identity(self) -> bytes:
        return self.context.identity

    def _stop(self, jobs: dict[str, Job], job: Job, why: str) -> None:
        """End a job: at once where no thread works on it, else as soon as its thread notices. The lock is held."""
        if job.is_stopped:
            return
        job.is_stopped = True
        if job.connection is not None:
            with contextlib.suppress(OSError):
                job.connection.shutdown(socket.SHUT_RDWR)
        elif job.future is None or job.future.cancel():
            del jobs[job.key]
            self._ended.append(Transfer(job.key, False, error=why))

    def _end(self, jobs: dict[str, Job], job: Job, error: str, num_bytes: int, started: float) -> None:
        with self._lock:
            del jobs[job.key]
            self._ended.append(Transfer(job.key, not error, num_bytes, time.monotonic() - started, error))

    def poll(self) -> list[Transfer]:
        now = time.monotonic()
        with self._lock:
            for jobs in (self._offers, self._receptions):
                for job in [job for job in jobs.values() if now > job.deadline and job.connection is None]:
                    self._stop(jobs, job, "the deadline has passed")
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._is_closed = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        with self._lock:
            for jobs in (self._offers, self._receptions):
                for job in list(jobs.values()):
                    self._stop(jobs, job, "the worker is closing")
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the deadline has passed"
    if isinstance(error, OSError):
        return f"the connection failed ({error.strerror or error})"
    return str(error)
