"""One entry as a file: a header, and the bytes.

    offset  bytes
    0       8       "fwk kv 1"
    8       32      identity: what model, precision, layout and rank the bytes are of
    40      32      key: what content they are of
    72      8       number of bytes that follow the header, little-endian
    80      32      blake2b of everything else: the header before it, and the bytes after
    112     ...     the bytes

A file is written under another name and renamed when it is whole, so no reader sees half of it, whoever else writes.
What a crash or a faulty disk leaves behind is found out by length and checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct

MAGIC = b"fwk kv 1"
HEADER_BYTES = 112
UNFINISHED = ".unfinished"


def _header(identity: bytes, key: bytes, data: memoryview) -> bytes:
    head = struct.pack("<8s32s32sQ", MAGIC, identity, key, data.nbytes)
    digest = hashlib.blake2b(head, digest_size=32)
    digest.update(data)
    return head + digest.digest()


def write(path: str, identity: bytes, key: bytes, data: memoryview) -> None:
    """Write an entry. Raises ``OSError``; then nothing is left behind."""
    folder = os.path.dirname(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    unfinished = os.path.join(folder, secrets.token_hex(16) + UNFINISHED)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            for part in (memoryview(_header(identity, key, data)), data):
                while part:
                    part = part[file.write(part) :]
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # neither a link nor a wait


def read(path: str, identity: bytes, key: bytes, into: memoryview) -> bool:
    """Read an entry; False when there is none, or what is there is not this entry, whole and undamaged.

    A file that is no such entry is removed. Raises ``OSError`` for anything but a missing file.
    """
    header = bytearray(HEADER_BYTES)
    try:
        with open(path, "rb", buffering=0, opener=_opener) as file:
            has_length = os.fstat(file.fileno()).st_size == HEADER_BYTES + into.nbytes
            is_read = has_length and file.readinto(header) == HEADER_BYTES and file.readinto(into) == into.nbytes
    except FileNotFoundError:
        return False
    if is_read and bytes(header) == _header(identity, key, into):
        return True
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return False
