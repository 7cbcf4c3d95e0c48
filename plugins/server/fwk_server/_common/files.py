"""Files that clients upload, and the results of batches, on disk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import orjson
from starlette.exceptions import HTTPException

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown
from fwk_server._common.records import Records

MAX_NAME = 255
MAX_FILES = 10_000


class UnknownFile(HTTPException):
    """No such file is there for this caller."""

    def __init__(self, name: str, param: str) -> None:
        self.param = param
        super().__init__(404, f"there is no file {shown(name)}")


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


class NoRoom(InvalidRequest):
    """The files take all the room there is."""


class FileStore:
    """At most ``max_bytes`` of files, and what is known of them, in ``records``."""

    def __init__(self, records: Records, max_bytes: int) -> None:
        self.records = records
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._files: dict[str, StoredFile] = {}
        self._lock = Lock()

    def load(self, in_use: Iterable[Path] = ()) -> None:
        """Take over what an earlier server kept. What nothing refers to, and is not ``in_use``, is removed."""
        used = set(in_use)
        for path in used:
            self._num_bytes += path.stat().st_size if path.exists() else 0
        for (tenant, name), data in self.records.all("file"):
            told = orjson.loads(data)
            path = self.records.folder / told.pop("path")
            if path.is_file() and not path.is_symlink():
                self._files[name] = StoredFile(tenant, path, id=name, **told)
                self._num_bytes += 0 if path in used else told["size"]
                used.add(path)
            else:
                self.records.delete("file", (tenant, name))
        for path in self.records.folder.iterdir():
            if path not in used and not path.name.startswith("records.sqlite"):
                path.unlink(missing_ok=True)

    def new_path(self) -> Path:
        """Where another file may be written. Raises ``NotServed`` as ``Records.check_open`` does."""
        self.records.check_open()
        return self.records.folder / uuid.uuid4().hex

    def take(self, size: int, *, is_new: bool = False) -> None:
        """Count ``size`` bytes that are about to be written, of a file that is not there yet if it ``is_new``.

        Raises ``NoRoom`` when they are too many.
        """
        with self._lock:
            if self._num_bytes + size > self._max_bytes or (is_new and len(self._files) >= MAX_FILES):
                raise NoRoom(
                    f"a server keeps {MAX_FILES} files of {self._max_bytes} bytes in all (--max-files-bytes): "
                    "delete one",
                    "file",
                )
            self._num_bytes += size

    def give_back(self, size: int) -> None:
        """Forget ``size`` bytes of ``take``."""
        with self._lock:
            self._num_bytes -= size

    def add(self, path: Path, filename: str, purpose: str, tenant: str, name: str | None = None) -> StoredFile:
        """Keep a file at ``new_path()``, whose bytes were taken. ``name``: its id."""
        file = StoredFile(tenant, path, filename[:MAX_NAME], purpose, path.stat().st_size)
        file.id = name or file.id
        self._files[file.id] = file
        told = {"path": path.name, "filename": file.filename, "purpose": purpose}
        told |= {"size": file.size, "created_at": file.created_at}
        self.records.put("file", (tenant, file.id), orjson.dumps(told))
        return file

    def get(self, name: str, tenant: str, param: str = "file_id") -> StoredFile:
        """A file of this tenant. Raises ``UnknownFile``; ``param`` is where its id was given."""
        self.records.check_open()
        file = self._files.get(name)
        if file is None or file.tenant != tenant:
            raise UnknownFile(name, param)
        return file

    def of(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, the oldest first."""
        self.records.check_open()
        return [file for file in self._files.values() if file.tenant == tenant]

    def delete(self, file: StoredFile) -> None:
        """Forget a file. One that is read meanwhile is read to its end."""
        if self._files.pop(file.id, None) is not None:
            self.give_back(file.size)
            self.records.delete("file", (file.tenant, file.id))
            file.path.unlink(missing_ok=True)
