"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fwk.testing import TINY, LoaderSuite, tiny_tensors

SAVE: Any = np.savez  # takes arrays by name


class TestMine(LoaderSuite):
    plugin = "mine"

    served_request = {"prompt": "7", "max_tokens": 8}

    def served_model(self, folder: Path) -> str:
        """All of the tiny model, with a tokenizer that knows digits."""
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(TINY))
        SAVE(folder / "model/mine.npz", **tiny_tensors())
        tokenizer = Tokenizer(WordLevel({str(i): i for i in range(TINY["vocab_size"])}, unk_token="0"))
        tokenizer.save(str(folder / "model/tokenizer.json"))
        return str(folder / "model")

    def sample(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        (folder / "config.json").write_text(json.dumps(TINY))
        arrays = {"model.norm.weight": np.arange(640.0, dtype=np.float32), "lm_head.weight": np.ones((40, 64))}
        SAVE(folder / "mine.npz", **arrays)
        return folder, {name: torch.from_numpy(array) for name, array in arrays.items()}
