"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fwk.plugins import Registered
from fwk.testing import LoRASourceSuite, ask

KEY = "administrator"


class TestMine(LoRASourceSuite):
    plugin = "mine"

    served_request = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}

    def serve_words(self, item: Registered, folder: Path) -> list[str]:
        options, _ = self.prepare(folder)
        more = ["--mine-adapters", str(options["mine_adapters"]), "--admin-api-key", KEY]
        return [*super().serve_words(item, folder), *more]

    def check_served(self, url: str, reply: Any) -> None:
        """A client that may loads an adapter by its name, and asks for it."""
        super().check_served(url, reply)
        ask(url, "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "one"}, KEY)
        other = ask(url, self.served_path, {**self.served_request, "model": "mine"})
        assert other["choices"][0]["text"] != reply["choices"][0]["text"]

    def prepare(self, folder: Path) -> tuple[dict[str, object], str]:
        (folder / "adapters/one").mkdir(parents=True)
        name = "model.layers.0.mlp.down_proj"
        matrices = {f"{name}.a": 30 * torch.ones(2, 128), f"{name}.b": torch.ones(64, 2)}
        save_file(matrices, folder / "adapters/one/mine.safetensors")
        return {"mine_adapters": str(folder / "adapters")}, "one"
