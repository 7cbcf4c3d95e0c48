"""The folder: whose it is, and how much is in it."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fwk.errors import ConfigError
from fwk_cache.file.entry import UNFINISHED

ABANDONED_SECONDS = 3600.0
"""An unfinished file of that age has lost its writer."""


def default_folder() -> Path:
    """``fwk/kv`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fwk" / "kv"


class Folder:
    """Keeps a folder below its size by removing the files that were used the longest ago.

    Others may write there too. They are counted when the folder is read, which happens after every sixteenth of its
    size written here, so each of several servers can be over the limit by as much at most.
    """

    def __init__(self, path: Path, limit: int) -> None:
        """limit: bytes. Raises ``ConfigError`` when the folder cannot be used, or is open to other users."""
        self._path = path
        self._limit = limit
        self._size = 0  # as far as known
        self._unseen = 0  # written since the folder was last read
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                raise ConfigError(f"--hicache-storage-dir {path}: is not a folder")
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ConfigError(
                    f"--hicache-storage-dir {path}: other users could read what is kept there; "
                    "name a new folder, or one of your own with mode 0700"
                )
            probe = path / f"{os.getpid()}{UNFINISHED}"
            probe.touch(0o600)
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {path}: cannot write there: {error.strerror}") from None
        self._read()

    def make_room(self, count: int) -> None:
        """Be sure that ``count`` bytes more are within the limit, and count them."""
        if self._unseen + count > self._limit // 16 or self._size + count > self._limit:
            self._read(count)
        self._size += count
        self._unseen += count

    def _read(self, count: int = 0) -> None:
        """Add up what is there, and remove the oldest until ``count`` bytes fit, with some to spare."""
        self._unseen = 0
        files = sorted(self._files())
        self._size = sum(size for _, size, _ in files)
        if self._size + count <= self._limit:
            return
        target = self._limit - self._limit // 8 - count
        for _, size, path in files:
            if self._size <= target:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._size -= size

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Time of last use, size and path of every entry; what others abandoned is removed."""
        old = time.time() - ABANDONED_SECONDS
        for folder, _, names in os.walk(self._path):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.lstat(path)
                    if name.endswith(UNFINISHED) and status.st_mtime < old:
                        os.unlink(path)
                        continue
                except OSError:
                    continue  # gone meanwhile
                yield status.st_mtime, status.st_size, path
