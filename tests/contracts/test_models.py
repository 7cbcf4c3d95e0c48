"""Model implementations, loaders and sources do what their contracts say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.seed_server import seed_of

from fwk_kit.testing import LoaderSuite, ModelSourceSuite, ModelSuite
from fwk_kit.testing.serving import TINY


class TestLlama(ModelSuite):
    plugin = "llama"


@pytest.mark.sweep
class TestTransformers(ModelSuite):
    plugin = "transformers"


class TestSafetensors(LoaderSuite):
    plugin = "safetensors"

    def sample(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        (folder / "config.json").write_text(json.dumps(TINY))
        tensors = {"model.norm.weight": torch.arange(64.0), "lm_head.weight": torch.ones(40, 64, dtype=torch.bfloat16)}
        save_file(tensors, folder / "model.safetensors")
        return folder, tensors


class TestRemoteInstance(LoaderSuite):
    """Over the real routes, from a folder of another name."""

    plugin = "remote_instance"

    @pytest.fixture(autouse=True)
    def seeds(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    options: ClassVar[dict[str, Any]] = {
        "remote_instance_weight_loader_seed_instance_ip": "127.0.0.1",
        "remote_instance_weight_loader_seed_instance_service_port": 9,
    }

    def sample(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        here, there = folder / "here", folder / "there"
        for place in (here, there):
            place.mkdir()
        _, tensors = TestSafetensors().sample(there)
        (here / "config.json").write_text(json.dumps(TINY))
        port, _ = self.stack.enter_context(seed_of(there))
        self.options = self.options | {"remote_instance_weight_loader_seed_instance_service_port": port}  # type: ignore[misc]
        return here, tensors


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
