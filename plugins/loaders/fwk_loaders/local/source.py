"""Folders and files."""

from __future__ import annotations

from pathlib import Path

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import ModelSource, Progress

_PATH_STARTS = ("./", "../", "/", "~")


class LocalSource(ModelSource):
    """Answers for every path that exists, and for names that can only be meant as one."""

    def fetch(self, name: str, revision: str | None, download_dir: Path, progress: Progress) -> Path | None:
        """The path itself. Raises ``ModelLoadError`` when it does not exist, or for a revision of it."""
        try:
            path = Path(name).expanduser()
            exists = path.exists()
        except (OSError, RuntimeError, ValueError) as error:  # unreadable parent, unknown ~user, NUL in the name
            why = getattr(error, "strerror", None) or error  # the name is told once
            raise ModelLoadError(f"model {name!r}: cannot be read as a path: {why}") from error
        if exists and revision is not None:
            raise ModelLoadError(f"--revision {revision}: {name!r} is on this machine and has none: leave it out")
        if exists:
            return path.absolute()
        if name in (".", "..") or name.startswith(_PATH_STARTS) or name.lower().endswith(".gguf"):
            raise ModelLoadError(f"model {name!r}: there is no such file or folder (looked for {path.absolute()})")
        return None
