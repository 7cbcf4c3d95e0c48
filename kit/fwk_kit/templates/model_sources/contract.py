"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

import json
from pathlib import Path

from fwk.testing import TINY, ModelSourceSuite


class TestMine(ModelSourceSuite):
    plugin = "mine"

    serve_with = {"load_format": "dummy"}
    served_request = {"prompt": "Hello", "max_tokens": 8}

    def served_model(self, folder: Path) -> str:
        return self.prepare(folder)

    def prepare(self, folder: Path) -> str:
        (folder / "tiny").mkdir()
        (folder / "tiny/config.json").write_text(json.dumps(TINY))
        type(self).options = {"mine_models": str(folder)}
        return "mine:tiny"
