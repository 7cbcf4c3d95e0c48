"""A folder of entries, written by a thread."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from pathlib import Path

from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext
from fwk_cache.file import FileOptions, entry
from fwk_cache.file.folder import Folder, default_folder

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 * 2**20
"""Copies that wait to be written, at most; what comes on top is not kept."""

PAUSE_SECONDS = 10.0
"""After a failed write (a full disk, say) nothing is written for so long."""

CLOSE_SECONDS = 1.0


class FileTier(CacheTier):
    """Entries by content, in ``FOLDER/IDENTITY/XX/NAME``; the name is a hash of identity and key.

    Nothing is remembered of the folder's contents, so several servers can share one: each finds what others wrote,
    and misses what they removed.
    """

    def __init__(self, context: CacheTierContext) -> None:
        super().__init__(context)
        options: FileOptions = context.options or FileOptions()
        path = Path(options.hicache_storage_dir).expanduser() if options.hicache_storage_dir else default_folder()
        limit = int(options.hicache_storage_size * 1e9)
        if limit < context.block_bytes + entry.HEADER_BYTES:
            raise ConfigError(
                f"--hicache-storage-size {options.hicache_storage_size:g} has no room for one block of "
                f"{context.block_bytes / 2**20:.2f} MiB"
            )
        self._folder = Folder(path, limit)
        self._base = os.path.join(path, context.identity.hex()[:32])
        try:
            os.makedirs(self._base, 0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {path}: cannot write there: {error.strerror}") from None
        self._waiting: dict[bytes, bytes] = {}  # copies not yet written
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._max_waiting = max(1, QUEUE_BYTES // context.block_bytes)
        self._paused_until = 0.0
        self._has_warned = False
        self._thread = threading.Thread(target=self._write_all, name="fwk-kv-files", daemon=True)
        self._thread.start()

    def contains(self, key: bytes) -> bool:
        if key in self._waiting:
            return True
        try:
            os.utime(self._path(key))  # the time of change is the time of last use
        except OSError:
            return False
        return True

    def get(self, key: bytes, into: memoryview) -> bool:
        waiting = self._waiting.get(key)
        if waiting is not None:
            into[:] = waiting
            return True
        try:
            return entry.read(self._path(key), self.context.identity, key, into)
        except OSError as error:
            self._warn(error)
            return False

    def put(self, key: bytes, data: memoryview) -> bool:
        if len(self._waiting) >= self._max_waiting or time.monotonic() < self._paused_until:
            return False
        if key not in self._waiting:
            self._waiting[key] = bytes(data)
            self._queue.put(key)
        return True

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _path(self, key: bytes) -> str:
        name = hashlib.blake2b(key, key=self.context.identity, digest_size=20).hexdigest()
        return os.path.join(self._base, name[:2], name)

    def _write_all(self) -> None:
        while (key := self._queue.get()) is not None:
            try:
                if time.monotonic() >= self._paused_until:
                    data = memoryview(self._waiting[key])
                    self._folder.make_room(data.nbytes + entry.HEADER_BYTES)
                    entry.write(self._path(key), self.context.identity, key, data)
            except OSError as error:
                self._paused_until = time.monotonic() + PAUSE_SECONDS
                self._warn(error)
            finally:
                del self._waiting[key]

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("K/V cannot be kept in %s, serving continues without: %s", self._base, error.strerror or error)
