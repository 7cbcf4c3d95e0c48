"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from fwk.testing import LoRASourceSuite


class TestMine(LoRASourceSuite):
    plugin = "mine"

    def prepare(self, folder: Path) -> tuple[dict[str, object], str]:
        (folder / "adapters/one").mkdir(parents=True)
        matrices = {"model.norm.a": torch.ones(2, 8), "model.norm.b": torch.ones(8, 2)}
        save_file(matrices, folder / "adapters/one/mine.safetensors")
        return {"mine_adapters": str(folder / "adapters")}, "one"
