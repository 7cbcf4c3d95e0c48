"""Models by a name of ours: ``mine:NAME`` is a folder below one that the operator names."""

from __future__ import annotations

from pathlib import Path

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import ModelSource, Progress

PREFIX = "mine:"


class MineSource(ModelSource):
    """Knows names with the prefix, and no others."""

    def fetch(self, name: str, revision: str | None, download_dir: Path, progress: Progress) -> Path | None:
        if not name.startswith(PREFIX):
            return None
        path = Path(self.context.options.mine_models) / name.removeprefix(PREFIX)
        if not path.is_dir():
            raise ModelLoadError(f"{name}: there is no folder {path}; say with --mine-models where the models are")
        return path
