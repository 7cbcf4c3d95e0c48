"""A folder of entries, written by a thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext
from fwk_cache._common.sealed import HEADER_BYTES, name_of
from fwk_cache._common.writer import READING, Writer
from fwk_cache.file import FileOptions, entry
from fwk_cache.file.folder import Folder, default_folder


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
        if limit < context.block_bytes + HEADER_BYTES:
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
        self._writer = Writer(self._write, context.block_bytes, self._base, "fwk-kv-files")

    def contains(self, key: bytes) -> bool:
        if key in self._writer.waiting:
            return True
        try:
            os.utime(self._path(key))  # the time of change is the time of last use
        except OSError:
            return False
        return True

    def get(self, key: bytes, into: memoryview) -> bool:
        waiting = self._writer.waiting.get(key)
        if waiting is not None:
            into[:] = waiting
            return True
        try:
            found = entry.read(self._path(key), self.context.identity, key, into)
        except OSError as error:
            self._writer.warn(error, READING)
            return False
        self._writer.works(READING)
        return found

    @property
    def trouble(self) -> str | None:
        return self._writer.trouble

    def reader(self) -> Callable[[bytes, memoryview], bool]:
        return self.get  # it changes nothing here, and files can be read from any thread

    def put(self, key: bytes, data: memoryview) -> bool:
        return self._writer.put(key, data)

    def close(self) -> None:
        self._writer.close()

    def _path(self, key: bytes) -> str:
        name = name_of(self.context.identity, key)
        return os.path.join(self._base, name[:2], name)

    def _write(self, key: bytes, data: memoryview) -> None:
        self._folder.make_room(data.nbytes + HEADER_BYTES)
        entry.write(self._path(key), self.context.identity, key, data)
