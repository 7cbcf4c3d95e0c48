"""Named tensors out of one or several safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import WeightSource
from fwk.interfaces.quant import PACKED, PLAIN
from fwk_loaders._common.layouts import check_plain, layouts_below
from fwk_loaders.safetensors.mapped import MappedFile
from fwk_loaders.safetensors.stored import check_header
from safetensors import SafetensorError, safe_open


class SafetensorsWeights(WeightSource):
    """The files stay mapped; a tensor's bytes are read when the tensor is asked for."""

    def __init__(
        self, folder: Path, files: Mapping[Path, list[str] | None], quantization_config: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._quantization = quantization_config
        self._files = {path: _open(path) for path in files}
        self._mapped = {path: MappedFile(path) for path in files}
        self._where: dict[str, Path] = {}
        for path, promised in files.items():
            held = list(self._files[path].keys())
            missing = set(promised or ()) - set(held)
            if missing:
                raise ModelLoadError(
                    f"{path}: tensor {min(missing)!r} is missing, but the index promises it here; fetch the file again"
                )
            for name in held if promised is None else promised:
                self._where[name] = path

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As stored; its memory is the file's, so it must not be written to."""
        path = self._path(name)
        check_plain(str(path), name, shape, self)
        return self.raw(name)

    def raw(self, name: str) -> Tensor:
        """As stored, of whatever shape."""
        path = self._path(name)
        try:
            found = self._mapped[path].tensor(name)
            return self._files[path].get_tensor(name) if found is None else found
        except (SafetensorError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise self._damaged(path, name, error) from error  # also a storage type this torch does not have

    def stored_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Floating-point tensors are ``plain``; quantised ones are in their bytes, whatever their layout."""
        found: dict[str, tuple[int, int]] = {}
        for path in self._files:
            for dtype, count in self._mapped[path].counts():
                layout = PLAIN if dtype.is_floating_point and dtype.itemsize > 1 else PACKED
                numbers, size = found.get(layout, (0, 0))
                found[layout] = (numbers + count, size + count * dtype.itemsize)
        return found

    def is_mapped(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the tensor is stored as that, at an address for it."""
        return name in self._where and self._mapped[self._where[name]].dtype_of(name) == dtype

    def release(self, names: Iterable[str]) -> None:
        """Have the system drop the pages of these tensors from this process."""
        for name in names:
            if name in self._where:
                self._mapped[self._where[name]].release(name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self._where

    def names(self) -> Iterable[str]:
        """All tensors."""
        return self._where.keys()

    def layouts(self, prefix: str) -> tuple[str, ...]:
        """One: a safetensors file holds a layer in one way."""
        return layouts_below(prefix, self._quantization, self._where, self)

    def dtype(self, name: str) -> str | None:
        """The type of a tensor in the file's words; None when it is not there."""
        if name not in self._where:
            return None
        return str(self._files[self._where[name]].get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """The size of a tensor. Raises ``ModelLoadError`` when it is missing or damaged."""
        path = self._path(name)
        try:
            return tuple(self._files[path].get_slice(name).get_shape())
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise self._damaged(path, name, error) from error

    def _path(self, name: str) -> Path:
        path = self._where.get(name)
        if path is None:
            raise ModelLoadError(
                f"{self._folder}: tensor {name!r} is missing: config.json and weights do not belong together, or the "
                "folder is no whole model"
            )
        return path

    @staticmethod
    def _damaged(path: Path, name: str, error: Exception) -> ModelLoadError:
        return ModelLoadError(f"{path}: tensor {name!r} cannot be read: {error}; fetch the file again")


def _open(path: Path) -> Any:
    try:
        check_header(path)
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error
