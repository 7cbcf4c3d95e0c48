"""Files whose paths come from options, requests or checkpoints: opened so that none can hang, or fill the memory.

A path may name a FIFO, on which ``open`` waits for a writer that never comes, or a device that never ends.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

MAX_OPTION_BYTES = 64 * 2**20
"""Of a file that an option names, where its own limit is not lower."""


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading, links to it followed. Raises ``OSError`` for anything else, and never waits."""
    return open(path, "rb", opener=_opened)


def check_regular(path: str | Path) -> None:
    """Raise ``OSError`` as ``open_regular`` does, for a library that opens the file itself."""
    open_regular(path).close()


def read_regular(path: str | Path, max_bytes: int = MAX_OPTION_BYTES) -> bytes:
    """All of a regular file. Raises ``OSError``, also for one of more than ``max_bytes``."""
    with open_regular(path) as file:
        # Not ``read(max_bytes)``, which reserves that much; and no file grows past what it was while it is read.
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes / 2**20:.3g} MiB, which no such file is", str(path))
    return content


def read_text(path: str | Path, max_bytes: int = MAX_OPTION_BYTES) -> str:
    """All of a text in UTF-8. Raises ``OSError`` as ``read_regular`` does, and ``UnicodeDecodeError``."""
    return read_regular(path, max_bytes).decode()


def _opened(path: str, flags: int) -> int:
    _check(os.stat(path).st_mode, path)  # first: opening a device may already do something
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(os.fstat(descriptor).st_mode, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a regular file", path)


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"
