"""The cache of built libraries: a folder of this user's, files that are checked before they are loaded.

The SHA-256 of a library is in a file next to it. A library that a full disk or a power failure cut short would
otherwise end the process with SIGBUS at every start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fwk_errors import PluginError

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folder() -> Path:
    """The cache's folder, made if it is not there. Raises ``PluginError`` where it cannot be made or trusted."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fwk" / "native"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise PluginError(f"no folder to keep built kernels in: {error}; name another in XDG_CACHE_HOME") from None
    _check_owner(path, status)
    if status.st_mode & OTHERS_MAY_WRITE:
        raise PluginError(f"other users may write to {path}, whose files would run as code: chmod go-w {path}")
    return path


def is_intact(library: Path) -> bool:
    """Whether the library is there, as it was stored. Raises ``PluginError`` for another user's file."""
    try:
        with library.open("rb") as file:
            status = os.fstat(file.fileno())
            _check_owner(library, status)
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        expected = _checksum_file(library).read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PluginError(f"the kernel {library} cannot be read: {error}; remove that file to build it anew") from None
    return not status.st_mode & OTHERS_MAY_WRITE and checksum.encode() == expected


def store(built: Path, library: Path) -> None:
    """Put a built file and its checksum into their places, each complete on the disk and in one move."""
    checksum = built.with_name("checksum")
    checksum.write_text(hashlib.sha256(built.read_bytes()).hexdigest(), encoding="ascii")
    for file, place in ((checksum, _checksum_file(library)), (built, library)):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fchmod(descriptor, 0o700)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(file, place)
    directory = os.open(library.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def locked(library: Path, waits: Callable[[], None]) -> Iterator[None]:
    """One process builds a library; others call ``waits``, wait and find it."""
    with library.with_name(f"{library.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def workspace(library: Path) -> Iterator[Path]:
    """An empty folder to build in, removed at the end; what a killed process left there is removed first.

    Only under the library's lock, as its name belongs to the library.
    """
    path = library.with_name(f"{library.name}.build")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise PluginError(
            f"{path} belongs to another user (uid {status.st_uid}), whose code is not run: remove it, or name another "
            "folder in XDG_CACHE_HOME"
        )
