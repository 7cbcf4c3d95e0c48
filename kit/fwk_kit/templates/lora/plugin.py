"""The adapters of a step one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fwk.interfaces.lora import AdaptedBatch, LoRABackend, LoRAContext, LoRALayer, LoRAMatrices, PackedAdapter

if TYPE_CHECKING:
    from torch import Tensor


class MineLoRA(LoRABackend):
    """Keeps each adapter's A and scaled B for every part it changes."""

    def __init__(self, context: LoRAContext) -> None:
        super().__init__(context)
        self._slots: list[PackedAdapter] = [{} for _ in range(context.max_adapters)]
        self._rows: dict[int, Tensor] = {}  # by slot: the tokens of the step

    def pack(self, layer: LoRALayer, matrices: Sequence[LoRAMatrices | None]) -> list[tuple[slice, Tensor, Tensor]]:
        packed: list[tuple[slice, Tensor, Tensor]] = []
        start = 0
        for part, own in zip(layer.parts, matrices, strict=True):
            end = start + len(part.outputs)
            if own is not None:
                a, b = own.a.to(self.context.dtype), (own.b.float() * own.scale).to(self.context.dtype)
                packed.append((slice(start, end), a, b))
            start = end
        return packed

    def load(self, slot: int, adapter: PackedAdapter) -> None:
        self._slots[slot] = adapter

    def clear(self, slot: int) -> None:
        self._slots[slot] = {}

    def plan(self, batch: AdaptedBatch) -> None:
        ids = batch.adapter_ids
        slots: Any = () if ids is None else set(ids.tolist())
        self._rows = {slot: torch.nonzero(ids == slot)[:, 0] for slot in slots if slot >= 0}

    def apply(self, y: Tensor, x: Tensor, layer: LoRALayer) -> Tensor:
        for slot, rows in self._rows.items():
            for outputs, a, b in self._slots[slot].get(layer.index, ()):
                y[rows, outputs] += x[rows] @ a.t() @ b.t()
        return y
