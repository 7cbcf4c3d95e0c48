"""Files that commands read and write: refused before the work, which may take an hour, and not after it."""

from __future__ import annotations

import argparse
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from fwk_files.regular import check_regular


def check_output(path: Path) -> None:
    """Raise ``OSError`` unless a regular file, or ``/dev/null``, is there or can be made there. Never waits."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        parent = path.parent
        if not stat.S_ISDIR(parent.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent)) from None
        mode, path = stat.S_IFREG, parent
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode) and path != Path(os.devnull):
        raise OSError(errno.EINVAL, "it is a FIFO, a socket or a device, not a regular file", str(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def output_file(text: str) -> Path:
    """The type of an argument of argparse: a path that ``check_output`` accepts, with ``~`` expanded."""
    return _checked(text, check_output, "write")


def input_file(text: str) -> Path:
    """The same of a regular file that is read."""
    return _checked(text, check_regular, "read")


def _checked(text: str, check: Callable[[Path], None], verb: str) -> Path:
    try:
        path = Path(text).expanduser()
        check(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot {verb} {text!r:.300}: {error.strerror}") from None
    except (ValueError, RuntimeError) as error:  # a null byte; ~ of an unknown user
        raise argparse.ArgumentTypeError(f"cannot {verb} {text!r:.300}: {error}") from None
    return path
