"""Transports that read another process's memory: a library moves the bytes, the signed connection vouches for them.

The sender names the memory of its blocks, and signs a digest of each piece; the receiver has the library read the piece
into a buffer of its own, and writes it to the KV cache when the digest is that of the sender. So what a library leaves
damaged, reads of a process that was started anew, or writes late, never is in a block: a buffer that was left in the
middle is not used again before the library is done with it.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec
import numpy as np

from fwk.interfaces.kv_transfer import KVTransferContext
from fwk_kv_transfer._common.signed import Job, SignedTransfer
from fwk_kv_transfer._common.wire import Wire, WireError

MAX_READS = 1024
"""Regions read at once: libraries queue them, and refuse more than their queues hold."""

MAX_BUFFERS = 16
"""Twice as many as transfers under way: the others may wait for a library that is not done with them."""

LOOK_SECONDS = 0.02
"""From one look at a transfer's connection to the next, while its bytes are on their way."""

DIGEST_BYTES = 32


class Lent(msgspec.Struct, frozen=True):
    """Where blocks are in the sender's memory. layers: address of block 0 and bytes from one block to the next."""

    source: bytes
    layers: list[tuple[int, int]]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Reads:
    """Regions to read: addresses here, addresses there, and bytes; of each the same number."""

    local: list[int]
    remote: list[int]
    sizes: list[int]


class MemoryTransfer(SignedTransfer):
    """A library's reads between a signed question and its signed answer. A transport implements the three below."""

    def __init__(self, context: KVTransferContext) -> None:
        super().__init__(context)
        rows = self._blocks.layers
        self._per_piece = max(1, min(self._blocks.per_piece, MAX_READS // max(len(rows), 1)))
        self._buffers = _Buffers(self._per_piece * self._blocks.block_bytes, self.register)
        self._source: bytes | None = None

    @abstractmethod
    def expose(self, regions: list[tuple[int, int]]) -> bytes:
        """Let others read memory, by address and bytes; what they need to reach it."""

    @abstractmethod
    def register(self, address: int, size: int) -> None:
        """Prepare memory of this process that is read into."""

    @abstractmethod
    def read(self, source: bytes, reads: Reads, is_stopped: Callable[[], bool]) -> None:
        """Read from another process, in a thread of its own; return when nothing writes to the memory any more.

        Where it has stopped meanwhile, soon. Raises what went wrong.
        """

    def address(self) -> bytes:
        if self._source is None:
            self._source = self.expose(_spans(self._blocks.layers))
        return super().address()

    def lend(self, wire: Wire, ids: np.ndarray) -> None:
        assert self._source is not None, "who offers has an address"
        layers = [(rows.ctypes.data, rows.strides[0]) for rows in self._blocks.layers]
        wire.send_message(msgspec.msgpack.encode(Lent(self._source, layers, ids.tolist())))
        for start in range(0, len(ids), self._per_piece):
            piece = ids[start : start + self._per_piece]
            wire.send(_digest(rows[piece] for rows in self._blocks.layers))

    def fetch(self, wire: Wire, job: Job) -> None:
        lent = msgspec.msgpack.decode(wire.receive_message(), type=Lent)
        if len(lent.layers) != len(self._blocks.layers) or len(lent.block_ids) != len(job.block_ids):
            raise WireError("the other side lends other blocks than it was asked for")
        theirs = np.array(lent.block_ids, np.int64)
        for start in range(0, len(theirs), self._per_piece):
            piece = slice(start, start + self._per_piece)
            digest = bytearray(DIGEST_BYTES)
            wire.receive_into(memoryview(digest))
            self._fetch_piece(job, lent, theirs[piece], job.block_ids[piece], bytes(digest))

    def _fetch_piece(self, job: Job, lent: Lent, theirs: np.ndarray, ours: np.ndarray, digest: bytes) -> None:
        buffer = self._buffers.take(lambda: _check(job))
        is_over = threading.Event()
        reads = _reads(buffer, [rows.shape[1] for rows in self._blocks.layers], lent.layers, theirs)
        future = _in_thread(lambda: self.read(lent.source, reads, is_over.is_set))
        try:
            while not future.done():
                _check(job)
                wait([future], LOOK_SECONDS)
            future.result()
            came = buffer.copy()  # what a read that was given up earlier writes late, it writes to the buffer alone
            found = _regions(came, [rows.shape[1] for rows in self._blocks.layers], len(ours))
            if not hmac.compare_digest(_digest(found), digest):
                raise WireError("what came is damaged, or not from the other side")
            for rows, region in zip(self._blocks.layers, found, strict=True):
                rows[ours] = region
        finally:
            is_over.set()
            future.add_done_callback(lambda _: self._buffers.give(buffer))


class _Buffers:
    """Memory that is read into, registered once and used in turn."""

    def __init__(self, size: int, register: Callable[[int, int], None]) -> None:
        self._size = size
        self._register = register
        self._free: list[np.ndarray] = []
        self._count = 0
        self._is_free = threading.Condition()

    def take(self, check: Callable[[], None]) -> np.ndarray:
        """A buffer [size] uint8 that nothing uses. check: raises to end the wait for one."""
        with self._is_free:
            while not self._free:
                check()
                if self._count < MAX_BUFFERS:
                    self._count += 1
                    made = np.empty(self._size, np.uint8)
                    self._register(made.ctypes.data, made.nbytes)
                    return made
                self._is_free.wait(LOOK_SECONDS)
            return self._free.pop()

    def give(self, buffer: np.ndarray) -> None:
        with self._is_free:
            self._free.append(buffer)
            self._is_free.notify()


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Run it in a thread that an exiting process does not wait for: libraries wait a minute for some peers."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # of any kind: the reception has ended
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="fwk-kv-read", daemon=True).start()
    return future


def _check(job: Job) -> None:
    """Raise where a reception is to end before its bytes have come: the library notices none of these."""
    job.check()
    if time.monotonic() > job.deadline:
        raise TimeoutError("the deadline has passed")
    assert job.connection is not None
    watched = select.poll()
    try:
        watched.register(job.connection, select.POLLRDHUP)
    except (OSError, ValueError):  # closed meanwhile
        raise WireError("the connection failed") from None
    if watched.poll(0):
        raise WireError("the other side ended the connection")


def _spans(layers: list[np.ndarray]) -> list[tuple[int, int]]:
    """Address and bytes of all memory in which rows are: of those that lie among each other, once."""
    spans: list[tuple[int, int]] = []
    for rows in sorted(layers, key=lambda rows: rows.ctypes.data):
        start = rows.ctypes.data
        end = start + (len(rows) - 1) * rows.strides[0] + rows.shape[1]
        if spans and start < sum(spans[-1]):
            first = spans[-1][0]
            spans[-1] = first, max(end, sum(spans[-1])) - first
        else:
            spans.append((start, end - start))
    return spans


def _reads(buffer: np.ndarray, row_bytes: list[int], layers: list[tuple[int, int]], ids: np.ndarray) -> Reads:
    """Regions of blocks in both memories: the buffer has layer after layer; neighbours are read as one."""
    reads = Reads([], [], [])
    local = buffer.ctypes.data
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    runs = list(zip([0, *breaks.tolist()], [*breaks.tolist(), len(ids)], strict=True))
    for size, (base, stride) in zip(row_bytes, layers, strict=True):
        for start, end in runs if stride == size else [(row, row + 1) for row in range(len(ids))]:
            reads.local.append(local + start * size)
            reads.remote.append(base + int(ids[start]) * stride)
            reads.sizes.append((end - start) * size)
        local += len(ids) * size
    return reads


def _regions(buffer: np.ndarray, row_bytes: list[int], count: int) -> list[np.ndarray]:
    """The rows [count, row_bytes] of each layer in a buffer."""
    ends = np.cumsum([count * size for size in row_bytes]).tolist()
    starts = [0, *ends[:-1]]
    return [buffer[a:b].reshape(count, -1) for a, b in zip(starts, ends, strict=True)]


def _digest(regions: Iterable[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for region in regions:
        digest.update(np.ascontiguousarray(region).reshape(-1).data)
    return digest.digest()
