"""A registry in a folder that all servers see: a file for each prefill server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
import time
from pathlib import Path
from urllib.parse import unquote

import msgspec

from fwk.errors import ConfigError
from fwk_files.regular import read_regular
from fwk_kv_transfer.remote_prefill.registry import MAX_ENTRIES, MAX_ENTRY_BYTES, Entry, Registry, RegistryError

_NAME = re.compile(r"[0-9a-f]{32}\.json")

MAX_FILES = 4 * MAX_ENTRIES
"""Looked at in the folder."""

KEPT_LEASES = 10
"""After so many, a file that nothing renews is removed by who reads it."""


class FileRegistry(Registry):
    """A server is there while its file changes: clocks of several machines need not agree.

    A file that was left behind is so taken for one of a living server once by each that reads it, for one lease.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._folder = Path(unquote(url.removeprefix("file://")))
        self._seen: dict[str, tuple[bytes, float]] = {}  # by file: what it held, and since when

    def check(self) -> None:
        if not self._folder.is_dir() or not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(
                f"--disaggregation-registry {self.url}: {self._folder} is no folder that this server can write to: "
                "make it first, where all prefill and decode servers see it"
            )

    async def put(self, name: str, entry: bytes, seconds: float) -> None:
        await self._run(lambda: self._write(f"{name}.json", entry))

    async def remove(self, name: str) -> None:
        await self._run(lambda: (self._folder / f"{name}.json").unlink(missing_ok=True))

    async def entries(self) -> list[bytes]:
        found: dict[str, bytes] = {}
        await self._run(lambda: found.update(self._read()))
        now = time.monotonic()
        self._seen = {
            name: before if (before := self._seen.get(name)) is not None and before[0] == data else (data, now)
            for name, data in found.items()
        }
        alive: list[bytes] = []
        for name, (data, since) in self._seen.items():
            age = (now - since) / _lease(data)
            if age <= 1:
                alive.append(data)
            elif age > KEPT_LEASES:
                await self._run(lambda name=name: (self._folder / name).unlink(missing_ok=True))
        return alive

    def _write(self, name: str, entry: bytes) -> None:
        """Whole or not at all."""
        handle, path = tempfile.mkstemp(prefix=".new-", dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(entry)
            Path(path).replace(self._folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                Path(path).unlink()
            raise

    def _read(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        with os.scandir(self._folder) as files:
            for _, file in zip(range(MAX_FILES), files, strict=False):
                if _NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError):  # gone meanwhile, or no entry
                        found[file.name] = read_regular(file.path, MAX_ENTRY_BYTES)
                if len(found) == MAX_ENTRIES:
                    break
        return found

    async def _run(self, work: object) -> None:
        """In a thread: a folder of another machine may not answer."""
        try:
            await asyncio.to_thread(work)  # type: ignore[arg-type]
        except OSError as error:
            raise RegistryError(f"cannot be used ({error.strerror or error})") from None


def _lease(data: bytes) -> float:
    """Seconds of an entry; an hour of what is none."""
    try:
        return max(msgspec.json.decode(data, type=Entry).seconds, 1.0)
    except (msgspec.DecodeError, ValueError):
        return 3600.0
