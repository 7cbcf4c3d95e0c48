"""A hash of every byte of a model's files, computed alongside the start, and once for each content."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from fwk_errors import ModelLoadError
from fwk_files.regular import open_regular

log = logging.getLogger(__name__)

RECENT_NS = 2 * 10**9
"""A file that changed so short a time ago may change once more without another time: its hash is not kept."""


class ModelHash:
    """The same for the same bytes, wherever they lie and whenever they were written. Made before the files are read.

    Hidden files are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._files = {file: _stat(file) for file in model_files(self._path)}
        self._lock = threading.Lock()
        self._found: Future[str] | None = None

    def start(self) -> None:
        """Compute it in a thread."""
        with self._lock:
            if self._found is None:
                self._found = Future()
                threading.Thread(target=self._fulfil, args=(self._found,), name="fwk-hash", daemon=True).start()

    def result(self) -> str:
        """Wait for it. Raises ``ModelLoadError`` where a file is not what it was at the beginning."""
        self.start()
        assert self._found is not None
        if not self._found.done():
            size = sum(stat[0] for stat in self._files.values()) / 1e9
            log.info("waiting for the hash of the model's files (%.1f GB; it is kept for later starts)", size)
        return self._found.result()

    def _fulfil(self, found: Future[str]) -> None:
        try:
            held = [(self._name(file), _hash(file, stat)) for file, stat in self._files.items()]
            found.set_result(hashlib.blake2b(json.dumps(held).encode(), digest_size=32).hexdigest())
        except BaseException as error:
            found.set_exception(error)

    def _name(self, file: Path) -> str:
        """Within the model; of one that is a file, none."""
        return file.relative_to(self._path).as_posix() if self._path.is_dir() else ""


def model_files(path: Path) -> list[Path]:
    """Those below a folder, in order, but for hidden ones; or the file itself."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and not _is_hidden(file, path)]


def _is_hidden(file: Path, path: Path) -> bool:
    return file != path and any(part.startswith(".") for part in file.relative_to(path).parts)


def _stat(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_dev, found.st_ino, found.st_ctime_ns, found.st_mtime_ns]


def _hash(file: Path, stat: list[int]) -> str:
    """Of a file that has been as ``stat`` says since."""
    kept = _kept(stat)
    with _locked(kept) as cache:
        found = _read(cache, stat)
        if found is None:
            with open_regular(file) as source:
                found = hashlib.file_digest(source, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
            if _stat(file) == stat and cache is not None and time.time_ns() - stat[3] > RECENT_NS:
                os.ftruncate(cache, 0)
                os.pwrite(cache, json.dumps([stat, found]).encode(), 0)
    if _stat(file) != stat:
        raise ModelLoadError(f"{file} changed while it was read: start again")
    return found


def _kept(stat: list[int]) -> Path:
    """Where a file's hash is kept, by its device and inode."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "fwk" / "hashes" / f"{stat[1]:x}-{stat[2]:x}.json"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """The cache's file, for one process at a time, so that the ranks of a run hash a file once. None: there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(cache: int | None, stat: list[int]) -> str | None:
    if cache is None:
        return None
    try:
        known, found = json.loads(os.pread(cache, 4096, 0))
    except ValueError:
        return None
    return found if known == stat and isinstance(found, str) else None
