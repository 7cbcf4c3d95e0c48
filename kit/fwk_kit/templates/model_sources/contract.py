"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from pathlib import Path

from fwk.testing import ModelSourceSuite


class TestMine(ModelSourceSuite):
    plugin = "mine"

    def prepare(self, folder: Path) -> str:
        (folder / "tiny").mkdir()
        type(self).options = {"mine_models": str(folder)}
        return "mine:tiny"
