"""Checkpoints that store matrices another way, seen under the names and shapes that layers ask for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import WeightSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WeightView(WeightSource):
    """Another source, some of whose plain tensors are read differently."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    @abstractmethod
    def seen(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The tensor if it is one that is read differently, else None."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self.seen(name, shape)
        return self.source.tensor(name, shape) if found is None else found

    def tensor_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        found = self.seen(name, shape)
        if found is None:
            return self.source.tensor_as(name, shape, dtype, out)
        return found.to(dtype) if out is None else out.copy_(found)

    def tensor_on(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        found = self.seen(name, shape)
        return self.source.tensor_on(name, shape, device) if found is None else found.to(device)

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def names(self) -> Iterable[str]:
        return self.source.names()

    def skip(self, name: str) -> None:
        self.source.skip(name)

    def layouts(self, prefix: str) -> tuple[str, ...]:
        return self.source.layouts(prefix)

    def raw(self, name: str) -> Tensor:
        return self.source.raw(name)


class Transposed(WeightView):
    """Matrices of some layers stand as [in_features, out_features] (GPT-2's Conv1D)."""

    def __init__(self, source: WeightSource, endings: tuple[str, ...]) -> None:
        super().__init__(source)
        self.endings = endings

    def seen(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self.source.tensor(name, shape[::-1]).t() if name.endswith(self.endings) else None


class StackedExperts(WeightView):
    """A layer's experts in two tensors, seen as ``{prefix}.experts.N.{gate,up,down}_proj.weight``.

    gate_up, down: their names. They are [num_experts, out_features, in_features], or with ``is_transposed``
    [num_experts, in_features, out_features]; gate stands before up.
    """

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        num_experts: int,
        gate_up: str,
        down: str,
        *,
        is_transposed: bool | None = False,
    ) -> None:
        """is_transposed: None: as the file has them, transposed where both would fit."""
        super().__init__(source)
        self.prefix, self.num_experts, self.is_transposed = f"{prefix}.experts.", num_experts, is_transposed
        self.stored = {"gate_proj": gate_up, "up_proj": gate_up, "down_proj": down}
        self._last: tuple[str, Tensor] | None = None

    def seen(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if not name.startswith(self.prefix):
            return None
        number, part, _ = name.removeprefix(self.prefix).split(".")
        stored, (rows, columns) = self.stored[part], shape
        size = (rows * (1 if part == "down_proj" else 2), columns)
        if self.is_transposed is None:
            self.is_transposed = self._fits(stored, (self.num_experts, *size[::-1]))
        matrix = self._read(stored, (self.num_experts, *(size[::-1] if self.is_transposed else size)))[int(number)]
        matrix = matrix.t() if self.is_transposed else matrix
        return {"gate_proj": matrix[:rows], "up_proj": matrix[-rows:], "down_proj": matrix}[part]

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        try:
            self._read(name, shape)
        except ModelLoadError:
            return False
        return True

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Kept until another is read: layers ask for one expert after another."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self.source.tensor(name, shape))
        return self._last[1]
