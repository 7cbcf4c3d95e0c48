"""From ggml's blocks to numbers by a native operator: what ``quants`` computes with torch, to the bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

import fwk_native as native
from fwk_loaders.gguf.quants import DamagedBlock, dequantise
from fwk_loaders.gguf.types import TENSOR_TYPES, TensorType
from fwk_native.thread_pool import ThreadPool, operator

SOURCE = Path(__file__).with_name("blocks.cpp")

BY_TORCH = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4")
"""Types of small files, which ``quants`` is quick enough for."""

NUMBERS = {stored.name: number for number, stored in TENSOR_TYPES.items() if stored.name not in BY_TORCH}


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("blocks", "values")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "type", "is_bfloat16")),
        ("damaged", ctypes.c_void_p),
    ]


class NativeBlocks:
    """A threads of its own, as a loader has no worker's; its threads sleep between tensors."""

    def __init__(self, instructions: str | None = None) -> None:
        """instructions: one of ``native.isas()``. Raises ``PluginError`` when the operator cannot be built."""
        self._threads = ThreadPool()
        self._operator = operator(native.load(SOURCE, instructions), "dequantise")

    def dequantise(self, blocks: Tensor, stored: TensorType, values: Tensor) -> None:
        """blocks: [num_blocks, block_bytes] uint8 to ``values``, [num_blocks * block_size] float32 or bfloat16.

        Raises ``DamagedBlock``.
        """
        if stored.name not in NUMBERS:
            dequantise(blocks, stored, values)
            return
        blocks = blocks.contiguous()
        damaged = ctypes.c_int32(0)
        call = _Call(
            *(blocks.data_ptr(), values.data_ptr(), blocks.shape[0], NUMBERS[stored.name]),
            *(values.dtype == torch.bfloat16, ctypes.addressof(damaged)),
        )
        self._threads.run(self._operator, call)
        if damaged.value:
            raise DamagedBlock
