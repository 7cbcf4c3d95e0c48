"""A checkpoint's tensors, remembering which were read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fwk.interfaces.loader import WeightSource
from fwk_process.load_progress import LoadProgress

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TrackedWeights(WeightSource):
    """Wraps a checkpoint, so that tensors no layer asked for are noticed instead of silently dropped."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._read: dict[str, None] = {}  # in order
        self.progress = LoadProgress(sum(1 for _ in source.names()))

    def _note(self, name: str) -> None:
        self._read.setdefault(name)
        self.progress.show(len(self._read))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._note(name)
        return self._source.tensor(name, shape)

    def tensor_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        self._note(name)
        return self._source.tensor_as(name, shape, dtype, out)

    def tensor_on(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        self._note(name)
        return self._source.tensor_on(name, shape, device)

    def skip(self, name: str) -> None:
        self._note(name)

    def stored_sizes(self) -> Mapping[str, tuple[int, int]]:
        return self._source.stored_sizes()

    def is_mapped(self, name: str, dtype: torch.dtype) -> bool:
        return self._source.is_mapped(name, dtype)

    def release(self, names: Iterable[str]) -> None:
        self._source.release(names)

    def raw(self, name: str) -> Tensor:
        self._note(name)
        return self._source.raw(name)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def names(self) -> Iterable[str]:
        return self._source.names()

    def layouts(self, prefix: str) -> tuple[str, ...]:
        return self._source.layouts(prefix)

    def read_since(self, count: int) -> list[str]:
        """Those that were read or skipped after the first ``count`` different ones."""
        return list(self._read)[count:]

    def unread(self, is_tied: bool) -> list[str]:
        """Tensors that were not read, less those known to repeat what is already there."""

        def is_redundant(name: str) -> bool:
            return name.endswith("rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")

        return sorted(name for name in self.names() if name not in self._read and not is_redundant(name))


class BaseModelWeights(TrackedWeights):
    """Of a checkpoint written by a decoder's class without a head: names lack the first part (``model.``)."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._names = frozenset(source.names())

    def _stored(self, name: str) -> str:
        rest = name.partition(".")[2]
        return rest if name not in self._names and rest in self._names else name

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return super().tensor(self._stored(name), shape)

    def tensor_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return super().tensor_as(self._stored(name), shape, dtype, out)

    def tensor_on(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return super().tensor_on(self._stored(name), shape, device)

    def skip(self, name: str) -> None:
        super().skip(self._stored(name))

    def raw(self, name: str) -> Tensor:
        return super().raw(self._stored(name))

    def has(self, name: str) -> bool:
        return super().has(self._stored(name))

    def is_mapped(self, name: str, dtype: torch.dtype) -> bool:
        return super().is_mapped(self._stored(name), dtype)

    def release(self, names: Iterable[str]) -> None:
        super().release(map(self._stored, names))

    def layouts(self, prefix: str) -> tuple[str, ...]:
        rest = prefix.partition(".")[2]
        if rest and not any(name.startswith(f"{prefix}.") for name in self._names):
            return super().layouts(rest)
        return super().layouts(prefix)
