"""Folders to write to: those that options name, temporary ones, and those that dead processes left. Public."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fwk_errors import ConfigError

PREFIX = "fwk-tmp-"
MIN_AGE = 5.0
"""Seconds, of a folder that is taken for a dead process's: a younger one may not be locked yet."""


def output_folder(path: str | Path, option: str) -> Path:
    """The absolute path of a folder that an option names; it is made, with mode 0700, unless it is there.

    Raises ``ConfigError``, which names the option and the path, for what is no folder or cannot be written to.
    """
    try:
        folder = Path(path).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        why = "nothing can be written there"
    except (FileExistsError, NotADirectoryError):
        why = "this, or a part of it, is not a folder"
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, RuntimeError) as error:  # a null byte; ~ of an unknown user
        why = str(error)
    raise ConfigError(f"{option} {str(path)!r:.300}: {why}; name a folder of your own")


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
