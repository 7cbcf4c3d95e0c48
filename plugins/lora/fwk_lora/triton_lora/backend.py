"""Launches the kernels: two for each layer, whatever adapters a step mixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from fwk.interfaces.lora import AdaptedBatch, LoRABackend, LoRAContext, LoRALayer, LoRAMatrices, LoRAPart, PackedAdapter
from fwk_lora.triton_lora import kernels

ROWS = 16
"""Tokens of a tile: as few as tensor cores multiply, for most steps have few of an adapter."""

COLUMNS = 64
"""Outputs of a program."""

BYTES = 128
"""Of a row that a program reads at once."""


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Those of all slots for one layer, on the device. A rank that an adapter does not have is zeros."""

    a: Tensor  # [num_slots, ranks of all parts, inputs]
    b: Tensor  # [num_slots, outputs of all parts, rank], scaled
    blocks: Tensor  # [num_blocks, 3] int32


@dataclass(frozen=True, slots=True)
class _Packed:
    """One adapter's part of ``_Matrices``, in host memory."""

    a: Tensor
    b: Tensor


class TritonLoRA(LoRABackend):
    """Room for every slot at the largest rank is made with the layers, so that memory is known before K/V takes its
    own. A step's tokens are sorted by adapter on the host, once for all layers."""

    def __init__(self, context: LoRAContext) -> None:
        super().__init__(context)
        self._rank = max(ROWS, 1 << (context.max_rank - 1).bit_length())
        self._matrices: list[_Matrices] = []
        # By slot, the layers that its adapter changes.
        self._held: list[set[int]] = [set() for _ in range(context.max_adapters)]
        self._tiles: Tensor | None = None
        self._tokens: Tensor | None = None
        self._num_tokens = 0

    def register(self, parts: Sequence[LoRAPart]) -> LoRALayer:
        layer = super().register(parts)
        if layer.index == len(self._matrices):
            context, ranks = self.context, len(layer.parts) * self._rank
            made: dict[str, Any] = {"dtype": context.dtype, "device": context.device}
            a = torch.zeros(context.max_adapters, ranks, len(layer.parts[0].inputs), **made)
            b = torch.zeros(context.max_adapters, sum(len(part.outputs) for part in layer.parts), self._rank, **made)
            self._matrices.append(_Matrices(a, b, torch.tensor(_blocks(layer), dtype=torch.int32).to(context.device)))
        return layer

    def pack(self, layer: LoRALayer, matrices: Sequence[LoRAMatrices | None]) -> _Packed:
        of_all = self._matrices[layer.index]
        a, b = (torch.zeros(x.shape[1:], dtype=x.dtype) for x in (of_all.a, of_all.b))
        output = 0
        for i, (part, own) in enumerate(zip(layer.parts, matrices, strict=True)):
            end = output + len(part.outputs)
            if own is not None:
                a[i * self._rank : i * self._rank + own.rank] = own.a.to(a.dtype)
                b[output:end, : own.rank] = (own.b.float() * own.scale).to(b.dtype)
            output = end
        return _Packed(a, b)

    def load(self, slot: int, adapter: PackedAdapter) -> None:
        for index in self._held[slot].difference(adapter):
            self._matrices[index].b[slot].zero_()
        for index, packed in adapter.items():
            self._matrices[index].a[slot].copy_(packed.a)
            self._matrices[index].b[slot].copy_(packed.b)
        self._held[slot] = set(adapter)

    def clear(self, slot: int) -> None:
        self.load(slot, {})

    def plan(self, batch: AdaptedBatch) -> None:
        self._num_tokens, ids = batch.num_tokens, batch.adapter_ids_np
        if ids is None or not (ids >= 0).any():
            self._tiles = self._tokens = None
            return
        tokens = np.argsort(ids, kind="stable")[int((ids < 0).sum()) :]
        slots, first = np.unique(ids[tokens], return_index=True)
        ends = np.append(first[1:], len(tokens))
        tiles = [
            (slot, at, min(ROWS, end - at))
            for slot, start, end in zip(slots.tolist(), first.tolist(), ends.tolist(), strict=True)
            for at in range(start, end, ROWS)
        ]
        numbers = np.concatenate((np.array(tiles, np.int32).ravel(), tokens.astype(np.int32)))
        there = self.context.send(numbers)
        self._tiles, self._tokens = there[: 3 * len(tiles)].view(-1, 3), there[3 * len(tiles) :]

    def apply(self, y: Tensor, x: Tensor, layer: LoRALayer) -> Tensor:
        tiles, tokens = self._tiles, self._tokens
        if tiles is None or tokens is None or not any(layer.index in held for held in self._held):
            return y
        assert x.shape[0] == self._num_tokens, "a layer saw other tokens than those of the planned batch"
        x = x if x.stride(1) == 1 else x.contiguous()
        y = y if y.stride(1) == 1 else y.contiguous()
        of_all = self._matrices[layer.index]
        ranks, inputs = of_all.a.shape[1:]
        inner = x.new_empty(len(tokens), ranks)
        columns = min(self._rank, COLUMNS)
        sizes = {"INPUTS": inputs, "RANKS": ranks, "ROWS": ROWS, "COLUMNS": columns, "STEP": BYTES // x.element_size()}
        grid = (len(tiles), triton.cdiv(ranks, columns))
        _launch(kernels.shrink_tiles, grid, x, x.stride(0), of_all.a, tiles, tokens, inner, **sizes)
        sizes = {"OUTPUTS": of_all.b.shape[1], "RANKS": ranks, "RANK": self._rank, "ROWS": ROWS, "COLUMNS": COLUMNS}
        given = (inner, of_all.b, tiles, tokens, of_all.blocks, y, y.stride(0))
        _launch(kernels.expand_tiles, (len(tiles), len(of_all.blocks)), *given, **sizes)
        return y


def _blocks(layer: LoRALayer) -> list[tuple[int, int, int]]:
    """Part, first output and the part's end, of COLUMNS outputs each."""
    found: list[tuple[int, int, int]] = []
    output = 0
    for i, part in enumerate(layer.parts):
        end = output + len(part.outputs)
        found += [(i, start, end) for start in range(output, end, COLUMNS)]
        output = end
    return found


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Arguments of a kernel are what its decorator makes of them: no type checker knows it."""
    kernel[grid](*arguments, **constants, IS_INTERPRETED=not arguments[0].is_cuda)
