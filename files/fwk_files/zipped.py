"""Zip files from others: their directory is bounded before ``zipfile`` reads it.

``zipfile`` reads the directory whole and makes objects of ten times its size before it can be asked for anything.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

MAX_DIRECTORY_BYTES = 4 * 2**20

_END = struct.Struct("<4s4H2LH")
"""The end of a zip file: magic, disks and members, bytes and place of the directory, bytes of a comment behind it."""

_LOCATOR_BYTES = 20
"""Before it, in zip files of 64 bits: where another end is, which counts instead."""


def check_directory(file: BinaryIO) -> None:
    """Raise ``ValueError`` for a file that is no zip file, or names more than any of ours has.

    Files with a comment, and those of 64 bits, are none of ours either. The message is the end of a sentence.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _END.size))
    end = file.read()
    magic, *_, num_bytes, _, comment = _END.unpack(end) if len(end) == _END.size else (b"", 0, 0, 0)
    file.seek(max(0, size - _END.size - _LOCATOR_BYTES))
    if magic != b"PK\5\6" or comment or file.read(4) == b"PK\6\7":
        raise ValueError("is no zip file, or cut short")
    if num_bytes > MAX_DIRECTORY_BYTES:
        raise ValueError(f"has more than {MAX_DIRECTORY_BYTES >> 20} MiB of names")
    file.seek(0)
