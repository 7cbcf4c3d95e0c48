"""Gives the weights that serve to other servers, tensor by tensor, from the files that they were read from.

``GET /remote_instance_weights`` lists the tensors, ``GET /remote_instance_weights/tensor`` has the bytes of one: blocks
of at most ``BLOCK_BYTES``, each behind its length (four bytes, little-endian) and before its digest (``block_digest``).
A length of zero means that the rest is no more of the tensor but a sentence that says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import orjson

from fwk.errors import FwkError, NotServed
from fwk.interfaces.dialect import Frontend
from fwk.interfaces.loader import StoredTensor
from fwk.interfaces.served_weights import FileState, ServedWeights, file_state

PATH = "/remote_instance_weights"
VERSION = 1
BLOCK_BYTES = 2**20
"""Of a stream there are three such in memory at the most: one that is read, one that is sent, one in the connection."""

DIGEST_BYTES = 32
NUM_READERS = 2
"""Threads that read files and compute digests for all streams, off the event loop and away from tokenising."""

CONFLICT = 409


@dataclass(frozen=True, slots=True)
class _Index:
    """The index as it is sent, and where the tensors lie."""

    weights: ServedWeights
    identity: str
    tensors: Mapping[str, StoredTensor]
    body: bytes


class RemoteWeights:
    """The weights that a frontend serves, as long as their files are what they were when an engine read them."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="fwk-weights")
        self._turn = asyncio.Lock()
        self._index: _Index | None = None

    async def close(self) -> None:
        """Read nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def index(self) -> bytes:
        """JSON: the identity of the weights, the model's config.json, and type and shape of each tensor.

        Raises ``NotServed`` where there are no files to give out, or no longer those that serve.
        """
        return (await self._current()).body

    async def stream(self, identity: str, name: str) -> AsyncGenerator[bytes, None]:
        """A tensor of the weights of this identity, in blocks. Raises ``NotServed`` for another identity or name."""
        index = await self._current()
        if identity != index.identity:
            raise NotServed("this server has taken other weights meanwhile: read its index again", CONFLICT)
        tensor = index.tensors.get(name)
        if tensor is None:
            raise NotServed(f"no tensor {name[:128]!r} is among the weights", 404)
        return self._blocks(index, name, tensor)

    async def _blocks(self, index: _Index, name: str, tensor: StoredTensor) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        state = index.weights.files[tensor.path]
        if not tensor.num_bytes:
            yield b""
        next_one: asyncio.Future[bytes] | None = None
        try:
            for start in range(0, tensor.num_bytes + BLOCK_BYTES, BLOCK_BYTES):  # a block is read while one is sent
                block = None if next_one is None else await next_one
                if self._frontend.served_weights is not index.weights:
                    yield _reason("the server has taken other weights meanwhile")
                    return
                if start < tensor.num_bytes:
                    next_one = loop.run_in_executor(self._threads, _block, index.identity, name, tensor, start, state)
                    next_one.add_done_callback(_seen)
                if block is not None:
                    yield block
        except (OSError, RuntimeError):  # a thread pool that is shut down is the latter
            yield _reason(f"{tensor.path.name} cannot be read, or is no longer what was served")
        finally:
            if next_one is not None:
                next_one.cancel()

    async def _current(self) -> _Index:
        """The index of what serves now; the files are looked at each time."""
        weights = self._frontend.served_weights
        if weights is None:
            raise NotServed("this server does not know the files of its weights", CONFLICT)
        if not weights.files:
            raise NotServed(
                f"the loader {weights.loader!r} read the weights, and not from files of plain tensors: only those of "
                "safetensors files are given out",
                CONFLICT,
            )
        async with self._turn:
            loop = asyncio.get_running_loop()
            changed = await loop.run_in_executor(self._threads, weights.changed)
            if changed is None and (self._index is None or self._index.weights is not weights):
                try:
                    self._index = await loop.run_in_executor(self._threads, _index, weights)
                except (FwkError, OSError):
                    raise NotServed("the files of the weights can no longer be read", CONFLICT) from None
                changed = await loop.run_in_executor(self._threads, weights.changed)
        if changed is not None:
            self._index = None
            raise NotServed(
                f"{changed.name} is no longer what this server read its weights from: start it again, or give it the "
                "new weights by /update_weights_from_disk",
                CONFLICT,
            )
        assert self._index is not None
        return self._index


def _index(weights: ServedWeights) -> _Index:
    tensors = weights.checkpoint.stored_tensors()
    places = {path: number for number, path in enumerate(weights.files)}
    known = hashlib.blake2b(digest_size=16)
    for path, state in weights.files.items():
        known.update(orjson.dumps([path.name, *state]))
    for name, item in sorted(tensors.items()):
        known.update(orjson.dumps([name, places[item.path], item.start, item.num_bytes, item.dtype, item.shape]))
    identity = known.hexdigest()
    told = {
        "version": VERSION,
        "identity": identity,
        "config": dict(weights.checkpoint.config()),
        "tensors": {name: [item.dtype, item.shape] for name, item in tensors.items()},
    }
    return _Index(weights, identity, tensors, orjson.dumps(told, option=orjson.OPT_NON_STR_KEYS))


def _block(identity: str, name: str, tensor: StoredTensor, start: int, state: FileState) -> bytes:
    """A block as it is sent. Raises ``OSError`` when the file is not what it was."""
    size = min(BLOCK_BYTES, tensor.num_bytes - start)
    framed = bytearray(4 + size + DIGEST_BYTES)
    struct.pack_into("<I", framed, 0, size)
    data = memoryview(framed)[4 : 4 + size]
    file = _open(tensor.path)
    try:
        done = 0
        while done < size:
            count = os.preadv(file, [data[done:]], tensor.start + start + done)
            if not count:
                raise OSError("the file is too short")
            done += count
        if file_state(file) != state:
            raise OSError("the file has changed")
    finally:
        os.close(file)
    framed[4 + size :] = block_digest(identity, name, start, data)
    return bytes(framed)


def _seen(block: asyncio.Future[bytes]) -> None:
    """Retrieve its error, so that asyncio does not log one of a block that is no longer awaited."""
    if not block.cancelled():
        block.exception()


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO in its place is not waited for


def block_digest(identity: str, name: str, start: int, block: memoryview) -> bytes:
    """SHA-256, for which processors have instructions, over ``IDENTITY START LENGTH NAME`` and the block."""
    digest = hashlib.sha256(f"{identity} {start} {len(name)} {name}".encode())
    digest.update(block)
    return digest.digest()


def _reason(text: str) -> bytes:
    return struct.pack("<I", 0) + text.encode()


def last_words(error: Exception) -> bytes:
    """The end of a stream that failed unexpectedly."""
    return _reason("the server failed")
