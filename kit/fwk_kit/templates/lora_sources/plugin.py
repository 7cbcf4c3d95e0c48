"""Adapters in files of their own: one safetensors file with ``NAME.a`` and ``NAME.b`` for every matrix NAME."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from fwk.errors import ModelLoadError
from fwk.interfaces.lora import AdapterWeights, LoRAMatrices, LoRASource

FILE = "mine.safetensors"


class MineSource(LoRASource):
    """Looks in one folder; a client's name is one plain word or it is unknown."""

    @property
    def is_open(self) -> bool:
        return bool(self.context.options.mine_adapters)

    def find(self, name: str) -> Path | None:
        if not self.is_open or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
            return None
        path = Path(self.context.options.mine_adapters) / name
        return path if (path / FILE).is_file() else None

    def open(self, path: Path) -> AdapterWeights | None:
        if not (path / FILE).is_file():
            return None
        data = (path / FILE).read_bytes()
        try:
            tensors = load(data)
            names = sorted(name.removesuffix(".a") for name in tensors if name.endswith(".a"))
            modules = {name: LoRAMatrices(tensors[f"{name}.a"], tensors[f"{name}.b"], 1.0) for name in names}
        except (SafetensorError, KeyError) as error:
            raise ModelLoadError(f"{FILE} is damaged: {error}") from None
        return AdapterWeights(hashlib.sha256(data).hexdigest(), modules)
