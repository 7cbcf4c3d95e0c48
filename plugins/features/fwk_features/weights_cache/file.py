"""A file of tensors that is mapped and not read: its index is at the end, and every chunk has a checksum.

Layout: ``MAGIC`` and zeros up to ``ALIGNMENT``; entries (``unfinished``), whose tensors lie at multiples of
``ALIGNMENT``; the index in msgpack; and ``TAIL``. It is written as NAME.tmp, which its writer has locked, and moved to
NAME once it is complete on the disk: a process killed at any point leaves no file, a whole one, or a NAME.tmp that the
next writer takes over, with the entries that are complete.
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
from typing import Any

import msgspec
import torch
from torch import Tensor

from fwk.interfaces.native import NativeThreads
from fwk_native import load
from fwk_native.thread_pool import operator

MAGIC = b"fwkw0001"
ENTRY = b"fwkentry"
"""What each entry begins with, once it is complete."""

ALIGNMENT = 64
CHUNK = 4 << 20
"""Bytes that have a checksum of their own: what a thread checks at a time."""

TEMPORARY = ".tmp"
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

SOURCE = Path(__file__).with_name("checksum.cpp")

TAIL = struct.Struct("<8sQQ32s")

Entry = tuple[Mapping[str, Any], Mapping[str, Tensor]]
"""Facts of numbers, text and lists, and named tensors."""


class DamagedFile(Exception):
    """The file is not what was written, or not of this user's. Says why, as a predicate."""


class Stored(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    start: int


class Index(msgspec.Struct):
    key: str
    entries: dict[str, tuple[dict[str, Any], dict[str, Stored]]]
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
            if status.st_size < TAIL.size + ALIGNMENT:
                raise DamagedFile("is truncated")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(f"cannot be read: {error.strerror}") from None
    index, end = _read_index(memory, key)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    protect(whole, len(memory))
    memory.madvise(mmap.MADV_WILLNEED)
    if checksums(whole[:end], threads) != index.sums:
        raise DamagedFile("is damaged: a checksum is not that of its bytes")
    return {name: (facts, {k: stored_tensor(whole, end, s) for k, s in held.items()})
            for name, (facts, held) in index.entries.items()}  # fmt: skip


def _read_index(memory: mmap.mmap, key: str) -> tuple[Index, int]:
    """The index and where tensors end."""
    tail = len(memory) - TAIL.size
    magic, start, size, digest = TAIL.unpack_from(memory, tail)
    if magic != MAGIC or memory[: len(MAGIC)] != MAGIC or start + size != tail or start % ALIGNMENT:
        raise DamagedFile("is truncated or of another version")
    packed = memory[start:tail]
    if hashlib.blake2b(packed, digest_size=32).digest() != digest:
        raise DamagedFile("is damaged: the index is not what was written")
    try:
        index = msgspec.msgpack.decode(packed, type=Index)
    except msgspec.DecodeError as error:
        raise DamagedFile(f"has an index that cannot be read: {error}") from None
    if index.key != key:
        raise DamagedFile("was made of another model, or for another machine")
    return index, start


def stored_tensor(whole: Tensor, end: int, stored: Stored) -> Tensor:
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedFile(f"holds numbers of the unknown type {stored.dtype}")
    size = math.prod(stored.shape) * dtype.itemsize
    if stored.start < 0 or stored.start % ALIGNMENT or stored.start + size > end:
        raise DamagedFile("has an index that points outside it")
    return whole[stored.start : stored.start + size].view(dtype).view(stored.shape)


def protect(whole: Tensor, size: int) -> None:
    """Make a mapping read-only, which torch would warn of were it so from the beginning."""
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(size), ctypes.c_int(mmap.PROT_READ))


def checksums(data: Tensor, threads: NativeThreads) -> bytes:
    """A checksum of each ``CHUNK`` bytes."""
    sums = torch.zeros(sums_size(len(data)) // 8, dtype=torch.int64)
    if len(data):
        call = _Checksum(data.data_ptr(), sums.data_ptr(), len(data) // 8, CHUNK // 8)
        threads.run(operator(load(SOURCE, "plain"), "checksum"), call)
    return sums.numpy().tobytes()


def sums_size(size: int) -> int:
    """Bytes of the checksums of so many bytes."""
    return -(-size // CHUNK) * 8


def size_of(entries: Mapping[str, Entry]) -> int:
    """About what a file of these takes."""
    return sum(x.numel() * x.element_size() for _, tensors in entries.values() for x in tensors.values())


@contextmanager
def reserved(path: Path, *, keeps: bool = False) -> Iterator[int | None]:
    """The descriptor of a NAME.tmp that no other process writes to; None while one does.

    It is empty, and removed at the end unless it was moved. keeps: what another writer left is there, and what this one
    leaves stays, if it is an entry or more.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        if not _lock(descriptor, temporary):
            yield None
            return
        status = os.fstat(descriptor)
        is_ours = status.st_uid == os.geteuid() and not status.st_mode & OTHERS_MAY_WRITE
        os.fchmod(descriptor, 0o600)
        if not (keeps and is_ours):
            os.ftruncate(descriptor, 0)
        try:
            yield descriptor
        finally:
            if _is_at(descriptor, temporary) and not (keeps and _has_entries(descriptor)):
                temporary.unlink()
    finally:
        os.close(descriptor)


def _has_entries(descriptor: int) -> bool:
    return os.pread(descriptor, len(ENTRY), ALIGNMENT) == ENTRY


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


def make_room(folder: Path, ending: str, max_bytes: int, own: Path | None = None) -> None:
    """Remove files, those used longest ago first, until all but ``own`` take ``max_bytes``.

    What stopped writers left counts as a file does where it has an entry, and is removed otherwise.
    """
    found: list[tuple[int, int, Path]] = []
    for file in folder.glob(f"*{ending}*"):
        if own is not None and file.name in (own.name, own.name + TEMPORARY):
            continue
        with contextlib.suppress(FileNotFoundError):
            is_unfinished = file.name.endswith(ending + TEMPORARY)
            if file.name.endswith(ending) or (is_unfinished and not _remove_abandoned(file, only_empty=True)):
                status = file.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= max_bytes:
            return
        if not file.name.endswith(TEMPORARY):
            file.unlink(missing_ok=True)
        elif not _remove_abandoned(file):
            continue
        total -= size


def _remove_abandoned(temporary: Path, *, only_empty: bool = False) -> bool:
    """Remove what a stopped writer left; whether it was: nobody may hold its lock. only_empty: it has no entry."""
    descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _lock(descriptor, temporary) or (only_empty and _has_entries(descriptor)):
            return False
        temporary.unlink()
        return True
    finally:
        os.close(descriptor)
