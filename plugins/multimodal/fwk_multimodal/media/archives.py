"""Files of arrays from another server, looked at before numpy reads them: none takes more memory than was sent."""

from __future__ import annotations

import math
import zipfile
from typing import Any, BinaryIO

import numpy as np

from fwk_files.zipped import check_directory


class BadArchive(ValueError):
    """A file that is not read. The message is the end of a sentence about it."""


def check_arrays(file: BinaryIO) -> None:
    """Raise ``BadArchive`` for an npz file whose arrays have more bytes than it has, or not as many as they say.

    numpy reserves what the header of an array says before it reads the numbers, and unpacks what is compressed.
    """
    size = file.seek(0, 2)
    try:
        check_directory(file)
    except ValueError as error:
        raise BadArchive(str(error)) from None
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise BadArchive("holds compressed arrays, which are not read")
            unpacked = sum(member.file_size for member in members)
            if unpacked > size:
                raise BadArchive(f"holds arrays of {unpacked} bytes in {size}")
            for member in members:
                with archive.open(member) as content:
                    _check_header(content, member)
    except BadArchive:
        raise
    except Exception:  # as zipfile and numpy raise many
        raise BadArchive("is a damaged file of arrays") from None


def _check_header(content: Any, member: zipfile.ZipInfo) -> None:
    if np.lib.format.read_magic(content) != (1, 0):
        raise BadArchive("holds an array of another form than numpy gives it")
    shape, _, dtype = np.lib.format.read_array_header_1_0(content)
    said = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or said != member.file_size - content.tell():
        raise BadArchive(f"holds an array of {member.file_size} bytes whose header says {said}")
