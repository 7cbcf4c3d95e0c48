"""One entry as a file: the header of ``_common/sealed.py``, and the bytes.

A file is written under another name and renamed when it is whole, so no reader sees half of it, whoever else writes.
What a crash or a faulty disk leaves behind is found out by length and checksum.
"""

from __future__ import annotations

import contextlib
import os
import secrets

from fwk_cache._common.sealed import HEADER_BYTES, header

UNFINISHED = ".unfinished"


def write(path: str, identity: bytes, key: bytes, data: memoryview) -> None:
    """Write an entry. Raises ``OSError``; then nothing is left behind."""
    folder = os.path.dirname(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    unfinished = os.path.join(folder, secrets.token_hex(16) + UNFINISHED)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            for part in (memoryview(header(identity, key, data)), data):
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
    head = bytearray(HEADER_BYTES)
    try:
        with open(path, "rb", buffering=0, opener=_opener) as file:
            has_length = os.fstat(file.fileno()).st_size == HEADER_BYTES + into.nbytes
            is_read = has_length and file.readinto(head) == HEADER_BYTES and file.readinto(into) == into.nbytes
    except FileNotFoundError:
        return False
    if is_read and bytes(head) == header(identity, key, into):
        return True
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return False
