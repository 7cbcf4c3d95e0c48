"""Files that clients upload, and the results of batches, on disk while the server runs."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from starlette.exceptions import HTTPException

from fwk.errors import ConfigError, InvalidRequest
from fwk_server._common.body import shown

MAX_NAME = 255
MAX_FILES = 10_000


class UnknownFile(HTTPException):
    """No such file is there for this caller."""

    def __init__(self, name: str, param: str) -> None:
        self.param = param
        super().__init__(404, f"there is no file {shown(name)}: a server keeps files as long as it runs")


@dataclass(slots=True)
class StoredFile:
    """One file, and whose it is."""

    tenant: str
    path: Path
    filename: str
    purpose: str
    size: int
    id: str = field(default_factory=lambda: f"file-{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def body(self) -> dict[str, Any]:
        """As the API tells of it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


def _made(folder: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return str(folder)
        why = "nothing can be written there"
    except OSError as error:
        why = str(error.strerror)
    raise ConfigError(f"--files-dir {folder}: {why}")


class FileStore:
    """At most ``max_bytes`` of files, in a folder of their own below ``parent``; None: where temporary files go."""

    def __init__(self, parent: str | None, max_bytes: int) -> None:
        """Raises ``ConfigError`` for a folder that cannot be had."""
        self._parent = parent if parent is None else _made(Path(parent).expanduser())
        self._folder: Path | None = None
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._files: dict[str, StoredFile] = {}

    def new_path(self) -> Path:
        """Where another file may be written."""
        if self._folder is None:  # most servers never need one
            self._folder = Path(tempfile.mkdtemp(prefix="fwk-files-", dir=self._parent))
        return self._folder / uuid.uuid4().hex

    def save(self, source: BinaryIO, size: int, filename: str, purpose: str, tenant: str) -> StoredFile:
        """Copy an upload of ``size`` bytes, off the event loop. Raises ``InvalidRequest`` when there is no room."""
        self.check_room(size)
        path = self.new_path()
        with path.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
        return self.add(path, filename, purpose, tenant)

    def check_room(self, size: int) -> None:
        """Raise ``InvalidRequest`` when ``size`` bytes more are too many."""
        if self._num_bytes + size > self._max_bytes or len(self._files) >= MAX_FILES:
            raise InvalidRequest(
                f"a server keeps {MAX_FILES} files of {self._max_bytes} bytes in all (--max-files-bytes): delete one",
                "file",
            )

    def add(self, path: Path, filename: str, purpose: str, tenant: str) -> StoredFile:
        """Keep a file that was written to ``new_path()``."""
        file = StoredFile(tenant, path, filename[:MAX_NAME], purpose, path.stat().st_size)
        self._files[file.id] = file
        self._num_bytes += file.size
        return file

    def get(self, name: str, tenant: str, param: str = "file_id") -> StoredFile:
        """A file of this tenant. Raises ``UnknownFile``; ``param`` is where its id was given."""
        file = self._files.get(name)
        if file is None or file.tenant != tenant:
            raise UnknownFile(name, param)
        return file

    def of(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, the oldest first."""
        return [file for file in self._files.values() if file.tenant == tenant]

    def delete(self, file: StoredFile) -> None:
        """Forget a file. One that is read meanwhile is read to its end."""
        if self._files.pop(file.id, None) is not None:
            self._num_bytes -= file.size
            file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
