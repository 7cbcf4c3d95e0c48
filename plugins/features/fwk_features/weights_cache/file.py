"""A file of tensors that is mapped and not read: its index is at the end, and every chunk has a checksum.

Layout: ``MAGIC`` and zeros up to ``ALIGNMENT``; tensors, each at a multiple of ``ALIGNMENT``; the index in msgpack; and
``_Tail``. It is written as NAME.tmp, which its writer has locked, and moved to NAME once it is complete on the disk: a
process killed at any point leaves no file, a whole one, or a NAME.tmp that the next writer takes over.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from fwk.interfaces.native import NativeThreads
from fwk_native import load
from fwk_native.thread_pool import ThreadPool, operator

MAGIC = b"fwkw0001"
ALIGNMENT = 64
CHUNK = 4 << 20
"""Bytes that have a checksum of their own: what a thread checks at a time."""

WRITTEN_AT_ONCE = 64 << 20
TEMPORARY = ".tmp"
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

SOURCE = Path(__file__).with_name("checksum.cpp")

_TAIL = struct.Struct("<8sQQ32s")

Entry = tuple[Mapping[str, Any], Mapping[str, Tensor]]
"""Facts of numbers, text and lists, and named tensors."""


class DamagedFile(Exception):
    """The file is not what was written, or not of this user's. Says why, as a predicate."""


class _Stored(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    start: int


class _Index(msgspec.Struct):
    key: str
    entries: dict[str, tuple[dict[str, Any], dict[str, _Stored]]]
    sums: bytes


class _Checksum(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "sums")),
        *((name, ctypes.c_int64) for name in ("num_words", "chunk")),
    ]


def read(path: Path, key: str, threads: NativeThreads) -> dict[str, Entry]:
    """Map a file and check every byte of it on ``threads``, which reads it ahead.

    Raises ``FileNotFoundError``, and ``DamagedFile`` when it must not be used. The tensors keep the mapping alive, are
    shared with other processes that map the file, and end the process that writes to them.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                raise DamagedFile(f"belongs to another user (uid {status.st_uid})")
            if status.st_mode & OTHERS_MAY_WRITE or not stat.S_ISREG(status.st_mode):
                raise DamagedFile("may be written to by other users")
            if status.st_size < _TAIL.size + ALIGNMENT:
                raise DamagedFile("is truncated")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(f"cannot be read: {error.strerror}") from None
    index, end = _read_index(memory, key)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    _protect(whole, len(memory))
    memory.madvise(mmap.MADV_WILLNEED)
    if _sums(whole[:end], threads) != index.sums:
        raise DamagedFile("is damaged: a checksum is not that of its bytes")
    return {name: (facts, {k: _tensor(whole, end, s) for k, s in held.items()})
            for name, (facts, held) in index.entries.items()}  # fmt: skip


def _read_index(memory: mmap.mmap, key: str) -> tuple[_Index, int]:
    """The index and where tensors end."""
    tail = len(memory) - _TAIL.size
    magic, start, size, digest = _TAIL.unpack_from(memory, tail)
    if magic != MAGIC or memory[: len(MAGIC)] != MAGIC or start + size != tail or start % ALIGNMENT:
        raise DamagedFile("is truncated or of another version")
    packed = memory[start:tail]
    if hashlib.blake2b(packed, digest_size=32).digest() != digest:
        raise DamagedFile("is damaged: the index is not what was written")
    try:
        index = msgspec.msgpack.decode(packed, type=_Index)
    except msgspec.DecodeError as error:
        raise DamagedFile(f"has an index that cannot be read: {error}") from None
    if index.key != key:
        raise DamagedFile("was made of another model, or for another machine")
    return index, start


def _tensor(whole: Tensor, end: int, stored: _Stored) -> Tensor:
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedFile(f"holds numbers of the unknown type {stored.dtype}")
    size = math.prod(stored.shape) * dtype.itemsize
    if stored.start < 0 or stored.start % ALIGNMENT or stored.start + size > end:
        raise DamagedFile("has an index that points outside it")
    return whole[stored.start : stored.start + size].view(dtype).view(stored.shape)


def _protect(whole: Tensor, size: int) -> None:
    """Make a mapping read-only, which torch would warn of were it so from the beginning."""
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(size), ctypes.c_int(mmap.PROT_READ))


def _sums(data: Tensor, threads: NativeThreads) -> bytes:
    """A checksum of each ``CHUNK`` bytes."""
    sums = torch.zeros(-(-len(data) // CHUNK), dtype=torch.int64)
    call = _Checksum(data.data_ptr(), sums.data_ptr(), len(data) // 8, CHUNK // 8)
    threads.run(operator(load(SOURCE, "plain"), "checksum"), call)
    return sums.numpy().tobytes()


def size_of(entries: Mapping[str, Entry]) -> int:
    """About what a file of these takes."""
    return sum(x.numel() * x.element_size() for _, tensors in entries.values() for x in tensors.values())


@contextmanager
def reserved(path: Path) -> Iterator[int | None]:
    """The descriptor of an empty NAME.tmp that no other process writes to; None while one does.

    The file is removed at the end unless ``write`` has moved it.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        if not _lock(descriptor, temporary):
            yield None
            return
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, 0)
        try:
            yield descriptor
        finally:
            if _is_at(descriptor, temporary):
                temporary.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the file was locked, and is still the one at ``path``: its last writer may have moved it away."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_at(descriptor, path)


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    return False


def write(descriptor: int, path: Path, key: str, entries: Mapping[str, Entry]) -> None:
    """Fill the file of ``reserved(path)`` and move it into its place. Raises ``OSError``."""
    os.pwrite(descriptor, MAGIC.ljust(ALIGNMENT, b"\0"), 0)
    index = _Index(key, {}, b"")
    end = ALIGNMENT
    for name, (facts, tensors) in entries.items():
        held: dict[str, _Stored] = {}
        for label, x in tensors.items():
            flat = (
                x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)
            )
            held[label] = _Stored(str(x.dtype).removeprefix("torch."), list(x.shape), end)
            _write_all(descriptor, memoryview(cast(Any, flat.numpy())), end)
            end += -(-len(flat) // ALIGNMENT) * ALIGNMENT
        index.entries[name] = (dict(facts), held)
    os.ftruncate(descriptor, end)
    with mmap.mmap(descriptor, end, access=mmap.ACCESS_COPY) as memory:
        data = torch.frombuffer(memory, dtype=torch.uint8)
        index.sums = _sums(data, ThreadPool(1))
        del data
    packed = msgspec.msgpack.encode(index)
    tail = _TAIL.pack(MAGIC, end, len(packed), hashlib.blake2b(packed, digest_size=32).digest())
    _write_all(descriptor, memoryview(packed + tail), end)
    os.fsync(descriptor)
    os.replace(path.with_name(path.name + TEMPORARY), path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    for first in range(0, len(data), WRITTEN_AT_ONCE):
        piece = data[first : first + WRITTEN_AT_ONCE]
        done = 0
        while done < len(piece):
            done += os.pwrite(descriptor, piece[done:], start + first + done)


def make_room(folder: Path, ending: str, max_bytes: int) -> None:
    """Remove files, those used longest ago first, until the rest take ``max_bytes``; and what killed writers left."""
    found: list[tuple[int, int, Path]] = []
    for file in folder.glob(f"*{ending}*"):
        with contextlib.suppress(FileNotFoundError):
            if file.name.endswith(TEMPORARY):
                _remove_abandoned(file)
            elif file.name.endswith(ending):
                status = file.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= max_bytes:
            return
        file.unlink(missing_ok=True)
        total -= size


def _remove_abandoned(temporary: Path) -> None:
    """Remove what a killed writer left: nobody holds its lock."""
    descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _lock(descriptor, temporary):
            temporary.unlink()
    finally:
        os.close(descriptor)
