"""Checkpoints of numpy: a folder with config.json, mine.npz and tokenizer.json."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import Checkpoint, Loader, WeightSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

FILE = "mine.npz"


class MineLoader(Loader):
    """Reads arrays of floating-point numbers."""

    @classmethod
    def reads(cls, path: Path) -> str | None:
        return None if (path / FILE).is_file() else f"needs a folder with {FILE}"

    def open(self, path: Path) -> Checkpoint:
        why = self.reads(path)
        if why is not None:
            raise ModelLoadError(f"{path}: the loader mine {why}")
        return MineCheckpoint(path)


class MineCheckpoint(Checkpoint):
    """Light: no array is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Mapping[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self.path / 'config.json'}: {error}") from None
        return found

    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer  # noqa: PLC0415 - a heavy library

        if not (self.path / "tokenizer.json").is_file():
            raise ModelLoadError(f"{self.path / 'tokenizer.json'} is missing")
        return Tokenizer.from_file(str(self.path / "tokenizer.json"))

    def tokenizer_config(self) -> Mapping[str, Any]:
        return {}

    def chat_template(self) -> str | None:
        return None

    def weights(self) -> WeightSource:
        return MineWeights(self.path / FILE)


class MineWeights(WeightSource):
    """The arrays of the file, as tensors."""

    def __init__(self, path: Path) -> None:
        import numpy as np  # noqa: PLC0415 - asking whether a folder can be read needs none of it

        self._path = path
        try:
            self._arrays = np.load(path, allow_pickle=False)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ModelLoadError(f"{path} is damaged: {error}") from None

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        import torch  # noqa: PLC0415

        if not self.has(name):
            raise ModelLoadError(f"{self._path} has no tensor {name}")
        try:
            found = self._arrays[name]
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ModelLoadError(f"{self._path}: {name} is damaged: {error}") from None
        if found.shape != shape:
            raise ModelLoadError(f"{self._path}: {name} is {found.shape}, not {shape}")
        return torch.from_numpy(found)

    def has(self, name: str) -> bool:
        return name in self._arrays

    def names(self) -> Iterable[str]:
        return list(self._arrays.files)
