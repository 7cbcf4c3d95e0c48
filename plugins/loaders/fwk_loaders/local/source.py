"""Folders and files."""

from __future__ import annotations

from pathlib import Path

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import ModelSource, Progress

_PATH_STARTS = ("./", "../", "/", "~")


class LocalSource(ModelSource):
    """Answers for every path that exists, and for names that can only be meant as one."""

    def fetch(self, name: str, revision: str | None, download_dir: Path, progress: Progress) -> Path | None:
        """The path itself. Raises ``ModelLoadError`` for a path that does not exist."""
        try:
            path = Path(name).expanduser()
            if path.exists():
                return path.absolute()
        except (OSError, RuntimeError, ValueError) as error:  # unreadable parent, unknown ~user, NUL in the name
            raise ModelLoadError(f"model {name!r}: cannot be read as a path: {error}") from error
        if name in (".", "..") or name.startswith(_PATH_STARTS) or name.lower().endswith(".gguf"):
            raise ModelLoadError(f"model {name!r}: there is no such file or folder (looked for {path.absolute()})")
        return None
