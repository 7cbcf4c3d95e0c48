"""Temporary files of sounds that are being transcribed."""

from __future__ import annotations

import threading
import uuid
import weakref
from pathlib import Path

import numpy as np

from fwk.errors import InvalidRequest, NotServed
from fwk.interfaces.dialect import SoundReading
from fwk_process.folders import TemporaryFolder

RATE = 16_000
NUM_BYTES = 2
"""Of a sample."""
GROWTH = 64
"""A decoded file is rarely so many times as large as it came; what is more is counted when it is there."""


class SoundFiles:
    """Counts their bytes. Safe to use from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._folder: TemporaryFolder | None = None
        self._lock = threading.Lock()

    def new_path(self) -> Path:
        """Where another may be written."""
        with self._lock:
            if self._folder is None:
                self._folder = TemporaryFolder("sounds")
            return self._folder.path / uuid.uuid4().hex

    def take(self, size: int, *, is_new: bool = False) -> None:
        """Count bytes that are about to be written. Raises ``NotServed`` when they are too many."""
        with self._lock:
            if self._num_bytes + size > self._max_bytes:
                raise NotServed("other sounds take all the room there is (--sound-files-bytes)", 503, 1)
            self._num_bytes += size

    def give_back(self, size: int) -> None:
        """Forget some of them."""
        with self._lock:
            self._num_bytes -= size

    def close(self) -> None:
        """Remove all."""
        with self._lock:
            if self._folder is not None:
                self._folder.close()


class OneUpload:
    """What an upload's bytes are counted in: no file has more than ``max_bytes``."""

    def __init__(self, files: SoundFiles, max_bytes: int) -> None:
        self._files = files
        self._left, self._max_bytes = max_bytes, max_bytes

    def new_path(self) -> Path:
        return self._files.new_path()

    def take(self, size: int, *, is_new: bool = False) -> None:
        """Raises ``InvalidRequest`` for a file that is too large."""
        if size > self._left:
            raise InvalidRequest(f"the file has more than {self._max_bytes} bytes (--max-sound-bytes)", "file")
        self._files.take(size, is_new=is_new)
        self._left -= size

    def give_back(self, size: int) -> None:
        self._files.give_back(size)


class Recording:
    """The samples of a file. They are removed when nothing refers to this any more."""

    def __init__(self, files: SoundFiles, path: Path, count: int) -> None:
        self.path, self.count = path, count
        weakref.finalize(self, _remove, files, path, count * NUM_BYTES)

    @classmethod
    def of(cls, files: SoundFiles, reading: SoundReading, source: Path) -> Recording:
        """Decode a file. Waits. Raises ``InvalidRequest`` that calls it ``file``, and ``NotServed``."""
        path, likely = files.new_path(), source.stat().st_size * GROWTH
        likely = min(likely, 2**28)
        files.take(likely)
        try:
            count = reading.decode(source, path, "file")
        except BaseException:
            _remove(files, path, likely)
            raise
        files.give_back(likely - count * NUM_BYTES)
        return cls(files, path, count)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.count / RATE

    def window(self, start: int, count: int) -> np.ndarray:
        """[n] int16, at most ``count``, from sample ``start`` on."""
        with self.path.open("rb") as file:
            file.seek(start * NUM_BYTES)
            return np.frombuffer(file.read(count * NUM_BYTES), "<i2")


def _remove(files: SoundFiles, path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    files.give_back(size)
