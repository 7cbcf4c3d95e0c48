"""The files that a server's weights were read from, and whether they are still the same."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fwk.interfaces.loader import Checkpoint


class FileState(NamedTuple):
    """What changes with a file. ``ctime_ns`` cannot be set, so it reveals bytes written in place, too.

    - ``size``: bytes.
    - ``mtime_ns``: last change of the content.
    - ``inode``: number of the file.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def file_state(file: Path | int) -> FileState:
    """Of a path, or of an open file. Raises ``OSError``."""
    found = os.stat(file)
    return FileState(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """A checkpoint that is served, and its weight files as they were before an engine read them.

    files: empty where the loader has none to show (``Checkpoint.weight_files``).

    - ``loader``: name of the plugin that opened it.
    - ``checkpoint``: as it was opened.
    """

    loader: str
    checkpoint: Checkpoint
    files: Mapping[Path, FileState]

    @classmethod
    def of(cls, loader: str, checkpoint: Checkpoint) -> ServedWeights:
        """Note the files' states now: a change after it is noticed. Raises ``OSError``."""
        return cls(loader, checkpoint, {path: file_state(path) for path in checkpoint.weight_files()})

    def changed(self) -> Path | None:
        """A file that is not what it was; None when all are."""
        for path, state in self.files.items():
            try:
                if file_state(path) != state:
                    return path
            except OSError:
                return path
        return None


class WeightUpdater(ABC):
    """Exchanges the weights that serve: a service (``Frontend.service``) of the server part that does.

    - ``served``: those that serve now; None: those of the start, or not known.
    """

    served: ServedWeights | None = None

    @abstractmethod
    async def update(self, model: str, load_format: str | None = None, *, aborts: bool = False) -> int:
        """``Frontend.update_weights``."""
