"""What clients left with a dialect: files in a folder, and a database of all else beside them."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from urllib.parse import quote

from fwk.errors import ConfigError, NotServed
from fwk.interfaces.dialect import Frontend
from fwk.interfaces.lifecycle import PluginLifecycle, Stage
from fwk_process.folders import TemporaryFolder, lock_folder, output_folder

SECONDS = 0.5
"""Between two looks whether another server still has the folder."""

_SCHEMA = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "CREATE TABLE IF NOT EXISTS records (kind TEXT, tenant TEXT, id TEXT, data BLOB, PRIMARY KEY (kind, tenant, id))",
)
_PUT = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)"
_DELETE = "DELETE FROM records WHERE kind = ? AND tenant = ? AND id = ?"

Key = tuple[str, str]  # the tenant, and the object's id

log = logging.getLogger(__name__)


class Records:
    """Below ``parent``, where the next server finds them, however this one ends; None: a temporary folder.

    One server at a time has a folder: while another one still has it, as at a take-over, what needs the folder raises
    ``NotServed``. Records are written by a thread, which waits for the disk.
    """

    def __init__(self, parent: str | None, dialect: str, frontend: Frontend) -> None:
        """Of a dialect over a model. Raises ``ConfigError`` for a folder that cannot be had."""
        self.is_lasting = parent is not None
        self._is_taken_over = parent is None
        own = quote(f"{dialect}@{frontend.card.name}", safe="@-")[:200]
        self._path = None if parent is None else output_folder(Path(parent) / own, "--files-dir")
        self._temporary: TemporaryFolder | None = None
        self._lock: int | None = None
        self._database: sqlite3.Connection | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._guard = Lock()
        self._last: Future[sqlite3.Cursor] | None = None

    def check_open(self) -> None:
        """Raise ``NotServed`` while the folder is another server's, or what that one kept is not taken over yet."""
        self._check_owned()
        if not self._is_taken_over:
            raise NotServed(
                "the server is starting: files and batches of the one before are not taken over yet", 503, 1
            )

    def _check_owned(self) -> None:
        if self._path is not None and self._database is None:
            raise NotServed(
                "another server keeps files in this server's folder: wait for its end, or give one of them another "
                "--files-dir",
                503,
                1,
            )

    @property
    def folder(self) -> Path:
        """Where files are. Raises ``NotServed`` while it is another server's."""
        self._check_owned()
        if self._path is None:
            with self._guard:
                self._temporary = self._temporary or TemporaryFolder("files")  # most servers never need one
            return self._temporary.path
        return self._path

    def open(self) -> bool:
        """Take the folder; False: another server has it. Raises ``ConfigError`` for one that cannot be read."""
        if self._path is None or self._database is not None:
            return True
        try:
            self._lock = lock_folder(self._path)
            if self._lock is None:
                return False
            database = sqlite3.connect(self._path / "records.sqlite", isolation_level=None, check_same_thread=False)
            try:
                for statement in _SCHEMA:
                    database.execute(statement)
            except sqlite3.Error:
                database.close()
                raise
        except (OSError, sqlite3.Error) as error:
            if self._lock is not None:
                os.close(self._lock)
            raise ConfigError(f"--files-dir: {self._path} cannot be used, move it away: {error}") from None
        self._database = database
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="fwk-records")
        return True

    def all(self, kind: str) -> list[tuple[Key, bytes]]:
        """The records of a kind, those written first first."""
        if self._database is None:
            return []
        order = "SELECT tenant, id, data FROM records WHERE kind = ? ORDER BY rowid"
        return [((tenant, name), data) for tenant, name, data in self._database.execute(order, (kind,))]

    def put(self, kind: str, key: Key, data: bytes) -> None:
        """Write a record, in place of the one with its key, by the end of the next ``flush``."""
        self._write(_PUT, (kind, *key, data))

    def delete(self, kind: str, key: Key) -> None:
        """Take a record away, as ``put`` writes one."""
        self._write(_DELETE, (kind, *key))

    async def flush(self) -> None:
        """Wait until all is on the disk. Raises ``NotServed`` where what was put last cannot be written."""
        if self._last is not None:
            try:
                await asyncio.shield(asyncio.wrap_future(self._last))
            except sqlite3.Error as error:
                raise NotServed(f"what is to be kept cannot be written: {error}", 503) from None

    def close(self) -> None:
        """Give the folder back; a temporary one is removed."""
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary is not None:
            self._temporary.close()

    def serve(self, lifecycle: PluginLifecycle, load: Callable[[], None]) -> None:
        """Open with the server, or as soon as the folder is free, and call ``load`` then, once the engines serve."""
        is_late = asyncio.Event()

        def take_over() -> None:
            try:
                load()
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise ConfigError(f"--files-dir: {self._path} cannot be taken over, move it away: {told}") from error
            self._is_taken_over = True

        async def setup() -> None:
            if not self.open():
                log.warning("--files-dir: another server has %s: waiting for its end", self._path)

        async def ready() -> None:
            if self._database is not None:
                take_over()
            else:
                is_late.set()

        async def wait() -> None:
            await is_late.wait()
            while not self.open():
                await asyncio.sleep(SECONDS)
            take_over()

        if self.is_lasting:
            lifecycle.on(Stage.SETUP, setup)
            lifecycle.on(Stage.READY, ready)
            lifecycle.background(wait)

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        if self._writer is not None:
            assert self._database is not None
            self._last = self._writer.submit(self._database.execute, statement, values)
            self._last.add_done_callback(_tell)


def _tell(future: Future[sqlite3.Cursor]) -> None:
    if (error := future.exception()) is not None:
        log.error("--files-dir: records cannot be written: %s", error)
