"""Temporary folders of this process, and those that dead ones left. Plugins of the API process use it, too."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "fwk-tmp-"
MIN_AGE = 5.0
"""Seconds, of a folder that is taken for a dead process's: a younger one may not be locked yet."""


def lock_folder(path: str | Path) -> int | None:
    """A descriptor that keeps a folder for this process until it is closed; None: another process has it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class TemporaryFolder:
    """A new folder of mode 0700, kept by a lock until it is closed. Folders of dead processes go first."""

    def __init__(self, purpose: str) -> None:
        parent = tempfile.gettempdir()
        for entry in Path(parent).glob(f"{PREFIX}*"):
            with suppress(OSError):
                found = entry.lstat()
                is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
                if is_ours and time.time() - found.st_mtime > MIN_AGE and (held := lock_folder(entry)) is not None:
                    shutil.rmtree(entry, ignore_errors=True)
                    os.close(held)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent))
        self._lock = lock_folder(self.path)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
