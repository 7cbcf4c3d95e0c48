"""Model implementations, loaders and sources do what their contracts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fwk_kit.testing import LoaderSuite, ModelSourceSuite, ModelSuite
from fwk_kit.testing.serving import TINY


class TestLlama(ModelSuite):
    plugin = "llama"


@pytest.mark.slow
class TestTransformers(ModelSuite):
    plugin = "transformers"


class TestSafetensors(LoaderSuite):
    plugin = "safetensors"

    def sample(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        (folder / "config.json").write_text(json.dumps(TINY))
        tensors = {"model.norm.weight": torch.arange(64.0), "lm_head.weight": torch.ones(40, 64, dtype=torch.bfloat16)}
        save_file(tensors, folder / "model.safetensors")
        return folder, tensors


class TestGguf(LoaderSuite):
    """Its refusals; what it reads: tests/plugins/loaders."""

    plugin = "gguf"


class TestLocal(ModelSourceSuite):
    plugin = "local"

    def prepare(self, folder: Path) -> str:
        (folder / "config.json").write_text(json.dumps(TINY))
        return str(folder)


class TestHub(ModelSourceSuite):
    plugin = "hub"


class TestWheel(ModelSourceSuite):
    plugin = "wheel"
