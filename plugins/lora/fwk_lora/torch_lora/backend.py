"""For each adapter of a step, its tokens times A, times B, added where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.interfaces.lora import AdaptedBatch, LoRABackend, LoRAContext, LoRALayer, LoRAMatrices, PackedAdapter


@dataclass(frozen=True, slots=True)
class _Piece:
    """One part's B, and where its rank and its output lie."""

    b: Tensor  # [rank, out_features], scaled
    ranks: slice  # columns of x @ A
    outputs: slice  # columns of y


@dataclass(frozen=True, slots=True)
class _Packed:
    """An adapter's matrices for one layer."""

    a: Tensor  # [sum of the parts' ranks, in_features]
    pieces: tuple[_Piece, ...]


Rows = slice | Tensor


class TorchLoRA(LoRABackend):
    """Groups a step's tokens by adapter. Ranks need no padding, and a layer an adapter leaves alone costs nothing.

    Matrices stay in host memory until their adapter gets a slot; where the host is the device they are not copied.
    """

    def __init__(self, context: LoRAContext) -> None:
        super().__init__(context)
        self._slots: list[PackedAdapter] = [{} for _ in range(context.max_adapters)]
        self._groups: list[tuple[Rows, PackedAdapter]] = []
        self._num_tokens = 0

    def pack(self, layer: LoRALayer, matrices: Sequence[LoRAMatrices | None]) -> _Packed:
        dtype = self.context.dtype
        pieces: list[_Piece] = []
        a: list[Tensor] = []
        rank = output = 0
        for part, own in zip(layer.parts, matrices, strict=True):
            end = output + len(part.outputs)
            if own is not None:
                b = (own.b.float() * own.scale).to(dtype).t().contiguous()
                pieces.append(_Piece(b, slice(rank, rank + own.rank), slice(output, end)))
                a.append(own.a.to(dtype))
                rank += own.rank
            output = end
        return _Packed(torch.cat(a), tuple(pieces))

    def load(self, slot: int, adapter: PackedAdapter) -> None:
        self._slots[slot] = {index: self._placed(packed) for index, packed in adapter.items()}

    def _placed(self, packed: _Packed) -> _Packed:
        device = self.context.device
        return _Packed(packed.a.to(device), tuple(replace(piece, b=piece.b.to(device)) for piece in packed.pieces))

    def clear(self, slot: int) -> None:
        self._slots[slot] = {}

    def plan(self, batch: AdaptedBatch) -> None:
        self._groups = []
        self._num_tokens = batch.num_tokens
        if batch.adapter_ids_np is None:
            return
        for slot in np.unique(batch.adapter_ids_np).tolist():
            if slot >= 0:
                self._groups.append((self._rows(batch.adapter_ids_np == slot), self._slots[slot]))

    def _rows(self, is_mine: np.ndarray) -> Rows:
        """Neighbours as a slice: nothing is gathered or scattered for them."""
        (rows,) = is_mine.nonzero()
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return slice(first, last + 1)
        return self.context.send(rows)

    def apply(self, y: Tensor, x: Tensor, layer: LoRALayer) -> Tensor:
        if not self._groups:
            return y
        assert x.shape[0] == self._num_tokens, "a layer saw other tokens than those of the planned batch"
        for rows, adapter in self._groups:
            packed = adapter.get(layer.index)
            if packed is None:
                continue
            if isinstance(rows, slice):
                h = F.linear(x[rows], packed.a)
                for piece in packed.pieces:
                    y[rows, piece.outputs].addmm_(h[:, piece.ranks], piece.b)
            else:
                h = F.linear(x.index_select(0, rows), packed.a)
                for piece in packed.pieces:
                    y[:, piece.outputs].index_add_(0, rows, h[:, piece.ranks] @ piece.b)
        return y
