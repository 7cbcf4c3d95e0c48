"""From ggml's blocks to float32 by a native operator: what ``quants`` computes with torch, to the bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from fwk import native
from fwk.team import Team, operator
from fwk_loaders.gguf.quants import DamagedBlock
from fwk_loaders.gguf.types import TENSOR_TYPES, TensorType

SOURCE = Path(__file__).with_name("blocks.cpp")

NUMBERS = {stored.name: number for number, stored in TENSOR_TYPES.items()}


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("blocks", "values")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "type")),
        ("damaged", ctypes.c_void_p),
    ]


class NativeBlocks:
    """A team of its own, as a loader has no worker's; its threads sleep between tensors."""

    def __init__(self, instructions: str | None = None) -> None:
        """instructions: one of ``native.isas()``. Raises ``PluginError`` when the operator cannot be built."""
        self._team = Team()
        self._operator = operator(native.load(SOURCE, instructions), "dequantise")

    def dequantise(self, blocks: Tensor, stored: TensorType) -> Tensor:
        """blocks: [num_blocks, block_bytes] uint8 to [num_blocks * block_size] float32. Raises ``DamagedBlock``."""
        blocks = blocks.contiguous()
        values = torch.empty(blocks.shape[0] * stored.block_size)
        damaged = ctypes.c_int32(0)
        call = _Call(
            *(blocks.data_ptr(), values.data_ptr(), blocks.shape[0], NUMBERS[stored.name], ctypes.addressof(damaged))
        )
        self._team.run(self._operator, call)
        if damaged.value:
            raise DamagedBlock
        return values
