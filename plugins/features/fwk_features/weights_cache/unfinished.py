"""A file of packed weights while it is written: entry after entry, of which a process that is stopped leaves all.

Each entry is a ``_HEAD``, a ``_Record`` in msgpack, and its tensors, at multiples of ``ALIGNMENT``. The head is written
last, so that an entry with one is complete; a checksum of the tensors finds what had not reached the disk when the
power of a machine failed. ``finish`` adds the index, by which ``file.read`` finds the tensors, and moves the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from fwk.interfaces.native import NativeThreads
from fwk_features.weights_cache.file import (
    ALIGNMENT,
    ENTRY,
    MAGIC,
    TAIL,
    TEMPORARY,
    DamagedFile,
    Entry,
    Index,
    Stored,
    checksums,
    protect,
    stored_tensor,
    sums_size,
)
from fwk_native.thread_pool import ThreadPool

WRITTEN_AT_ONCE = 64 << 20

_HEAD = struct.Struct("<8sQ32s")


class _Record(msgspec.Struct, array_like=True):
    """tensors: their places count from the first one's. size: of all, a multiple of ``ALIGNMENT``."""

    key: str
    name: str
    facts: dict[str, Any]
    tensors: dict[str, Stored]
    size: int
    sums: bytes


class UnfinishedFile:
    """NAME.tmp of ``file.reserved(path, keeps=True)``. Without ``recover``, what is there is overwritten."""

    def __init__(self, descriptor: int, path: Path, key: str) -> None:
        self._descriptor, self._path, self._key = descriptor, path, key
        self._entries: dict[str, tuple[dict[str, Any], dict[str, Stored]]] = {}
        self._end = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def recover(self, threads: NativeThreads) -> dict[str, Entry]:
        """The complete entries of a writer that was stopped, mapped read-only; what comes after them is cut off."""
        found: dict[str, Entry] = {}
        status = os.fstat(self._descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size > ALIGNMENT:
            memory = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            protect(whole, len(memory))
            if memory[: len(MAGIC)] == MAGIC:
                self._end = ALIGNMENT
                with contextlib.suppress(DamagedFile):
                    while True:
                        self._recover_next(memory, whole, threads, found)
        os.ftruncate(self._descriptor, self._end)
        return found

    def _recover_next(self, memory: mmap.mmap, whole: Tensor, threads: NativeThreads, found: dict[str, Entry]) -> None:
        """Raises ``DamagedFile`` where no complete entry of this key follows."""
        start = self._end + _HEAD.size
        if start > len(memory):
            raise DamagedFile("ends")
        magic, size, digest = _HEAD.unpack_from(memory, self._end)
        packed = memory[start : start + size] if magic == ENTRY and size < len(memory) else b""
        if not packed or hashlib.blake2b(packed, digest_size=32).digest() != digest:
            raise DamagedFile("ends in an entry that is not complete")
        try:
            record = msgspec.msgpack.decode(packed, type=_Record)
        except msgspec.DecodeError as error:
            raise DamagedFile(f"has an entry that cannot be read: {error}") from None
        first = _aligned(start + size)
        end = first + record.size
        if record.key != self._key or record.size < 0 or record.size % ALIGNMENT or end > len(memory):
            raise DamagedFile("has an entry of another model")
        if checksums(whole[first:end], threads) != record.sums:
            raise DamagedFile("has an entry whose bytes are not on the disk")
        places = {label: Stored(s.dtype, s.shape, s.start + first) for label, s in record.tensors.items()}
        found[record.name] = (record.facts, {label: stored_tensor(whole, end, s) for label, s in places.items()})
        self._entries[record.name], self._end = (record.facts, places), end

    def add(self, name: str, entry: Entry) -> None:
        """Write an entry behind the others. Raises ``OSError``."""
        facts, tensors = dict(entry[0]), entry[1]
        if not self._end:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, MAGIC.ljust(ALIGNMENT, b"\0"), 0)
            self._end = ALIGNMENT
        flat = {label: _bytes_of(x) for label, x in tensors.items()}
        stored, size = _placed(tensors, flat)
        record = _Record(self._key, name, facts, stored, size, bytes(sums_size(size)))
        first = _aligned(self._end + _HEAD.size + len(msgspec.msgpack.encode(record)))
        for label, data in flat.items():
            _write_all(self._descriptor, memoryview(cast(Any, data.numpy())), first + stored[label].start)
        end = first + size
        os.ftruncate(self._descriptor, end)
        record.sums = self._sums(first, end)
        packed = msgspec.msgpack.encode(record)
        head = _HEAD.pack(ENTRY, len(packed), hashlib.blake2b(packed, digest_size=32).digest())
        _write_all(self._descriptor, memoryview(packed), self._end + _HEAD.size)
        os.pwrite(self._descriptor, head, self._end)
        places = {label: Stored(s.dtype, s.shape, s.start + first) for label, s in stored.items()}
        self._entries[name], self._end = (facts, places), end

    def _sums(self, first: int, end: int) -> bytes:
        with mmap.mmap(self._descriptor, end, access=mmap.ACCESS_COPY) as memory:
            data = torch.frombuffer(memory, dtype=torch.uint8)
            sums = checksums(data[first:end], ThreadPool(1))
            del data
        return sums

    def abandon(self) -> None:
        """Leave nothing of it."""
        os.ftruncate(self._descriptor, 0)

    def finish(self) -> None:
        """Write the index, and move the file into its place. Raises ``OSError``."""
        index = Index(self._key, self._entries, self._sums(0, self._end))
        packed = msgspec.msgpack.encode(index)
        tail = TAIL.pack(MAGIC, self._end, len(packed), hashlib.blake2b(packed, digest_size=32).digest())
        _write_all(self._descriptor, memoryview(packed + tail), self._end)
        os.fsync(self._descriptor)
        os.replace(self._path.with_name(self._path.name + TEMPORARY), self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write(descriptor: int, path: Path, key: str, entries: Mapping[str, Entry]) -> None:
    """All of a file at once. Raises ``OSError``."""
    unfinished = UnfinishedFile(descriptor, path, key)
    for name, entry in entries.items():
        unfinished.add(name, entry)
    unfinished.finish()


def _placed(tensors: Mapping[str, Tensor], flat: Mapping[str, Tensor]) -> tuple[dict[str, Stored], int]:
    """Where tensors lie, from the first one's place, and the size of all."""
    found: dict[str, Stored] = {}
    end = 0
    for label, x in tensors.items():
        found[label] = Stored(str(x.dtype).removeprefix("torch."), list(x.shape), end)
        end = _aligned(end + len(flat[label]))
    return found, end


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    for first in range(0, len(data), WRITTEN_AT_ONCE):
        piece = data[first : first + WRITTEN_AT_ONCE]
        done = 0
        while done < len(piece):
            done += os.pwrite(descriptor, piece[done:], start + first + done)
