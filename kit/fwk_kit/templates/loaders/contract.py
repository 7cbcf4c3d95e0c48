"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fwk.testing import TINY, LoaderSuite


class TestMine(LoaderSuite):
    plugin = "mine"

    def sample(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        (folder / "config.json").write_text(json.dumps(TINY))
        arrays = {"model.norm.weight": np.arange(640.0, dtype=np.float32), "lm_head.weight": np.ones((40, 64))}
        np.savez(folder / "mine.npz", **arrays)  # pyright: ignore[reportArgumentType]
        return folder, {name: torch.from_numpy(array) for name, array in arrays.items()}
