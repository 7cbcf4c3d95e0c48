"""Tensors that llama.cpp's converter cut, joined, reordered or computed anew, as they were."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import PLAIN
from fwk_loaders.gguf.architecture import Architecture
from fwk_loaders.gguf.reader import GGUFFile, TensorInfo
from fwk_loaders.gguf.weights import GGUFWeights, layout_of, squeezed

_LAYER = re.compile(r"blk\.(\d{1,6})\.")


class ConvertedWeights(GGUFWeights):
    """Of an architecture with ``conversions``; all other tensors are read as everywhere."""

    def __init__(self, file: GGUFFile, architecture: Architecture, config: Mapping[str, Any]) -> None:
        super().__init__(file, architecture, config["num_attention_heads"], config["num_key_value_heads"])
        self._config = config

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of its own memory; its rows, columns and values as they were before the file was written."""
        found = self._architecture.conversion(name)
        if found is None:
            return super().tensor(name, shape)
        change, parts = found
        values = [self._values(name, info) for info in self._parts(name, parts)]
        whole = values[0] if len(values) == 1 else torch.cat([part.float() for part in values])
        if change.rows is not None:
            whole = self._ordered(name, whole, change.rows, is_cut=change.is_cut)
        if change.columns is not None:
            whole = self._ordered(name, whole.t(), change.columns).t().contiguous()
        whole = whole if change.values is None else change.values(whole.float())
        if squeezed(tuple(whole.shape)) != squeezed(shape):
            raise ModelLoadError(
                f"{self._file.path}: {' and '.join(map(repr, parts))} ({name}) make a tensor of the shape "
                f"{tuple(whole.shape)}, but the model needs {tuple(shape)}: the file's metadata and tensors do not "
                "belong together"
            )
        return whole.reshape(shape)

    def tensor_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The same, in a type."""
        if self._architecture.conversion(name) is None:
            return super().tensor_as(name, shape, dtype, out)
        found = self.tensor(name, shape)
        return found.to(dtype) if out is None else out.copy_(found)

    def raw(self, name: str) -> Tensor:
        """The blocks as stored, the rows as they were."""
        found = self._architecture.conversion(name)
        if found is None:
            return super().raw(name)
        change, parts = found
        infos = self._parts(name, parts)
        rows = torch.cat([self._rows(name, info) for info in infos])
        if change.rows is not None:
            rows = self._ordered(name, rows, change.rows, is_cut=change.is_cut)
        return rows.view(rows.shape[0], -1, infos[0].type.block_bytes)

    def release(self, names: Iterable[str]) -> None:
        """Let the pages of these tensors leave memory."""
        for name in names:
            found = self._architecture.conversion(name)
            if found is None:
                super().release([name])
            elif self.has(name):
                for info in self._parts(name, found[1]):
                    self._file.release(info)

    def layouts(self, prefix: str) -> tuple[str, ...]:
        """Blocks stay packed where only whole rows were moved, and all parts have one layout."""
        found = self._architecture.conversion(f"{prefix}.weight") if prefix else None
        if found is None:
            return super().layouts(prefix)
        change, parts = found
        layouts = {layout_of(info) for part in parts if (info := self._file.tensors.get(part)) is not None}
        moves_rows = change.columns is None and change.values is None
        return (*layouts, PLAIN) if moves_rows and len(layouts) == 1 and layouts != {PLAIN} else (PLAIN,)

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor, or all its parts."""
        found = self._architecture.conversion(name)
        return super().has(name) if found is None else all(part in self._file.tensors for part in found[1])

    def _given(self, stored: str, info: TensorInfo) -> list[str]:
        """Layers behind the last one predict further tokens: the checkpoint has them under another name."""
        layer, predictor = _LAYER.match(stored), self._architecture.predictor
        is_behind = predictor and layer is not None and int(layer[1]) >= self._config["num_hidden_layers"]
        return [f"{predictor}.{stored}"] if is_behind else super()._given(stored, info)

    def _parts(self, name: str, parts: list[str]) -> list[TensorInfo]:
        for part in parts:
            if part not in self._file.tensors:
                raise ModelLoadError(
                    f"{self._file.path}: tensor {part!r} (a part of {name!r}) is missing; the file is no whole model"
                )
        return [self._file.tensors[part] for part in parts]

    def _ordered(
        self, name: str, whole: Tensor, make: Callable[[Mapping[str, Any]], Any], *, is_cut: bool = False
    ) -> Tensor:
        order = torch.as_tensor(make(self._config))
        needed = int(order.max()) + 1
        if len(whole) < needed or (len(whole) > needed and not is_cut):
            raise ModelLoadError(
                f"{self._file.path}: {name} has {len(whole)} rows or columns stored, but the metadata say {needed}: "
                "the file's metadata and tensors do not belong together"
            )
        return whole[order]
