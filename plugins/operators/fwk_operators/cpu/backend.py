"""Hand tensors' pointers to the kernels (structures are the same as in operators.cpp)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

import fwk_native as native
from fwk.errors import ModelLoadError
from fwk.interfaces.graphs import GraphCapture
from fwk.interfaces.moe import Routing
from fwk.interfaces.operators import OperatorContext, Operators
from fwk_native.thread_pool import ThreadPool, operator
from fwk_operators.cpu.graph import TapeCapture

SOURCE = Path(__file__).with_name("operators.cpp")
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu": 2}

SMALL = 8192
"""Up to so many numbers one thread computes alone: waking others takes longer."""


class Norm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "residual", "out", "weight")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "size", "x_stride", "weight_heads")),
        ("eps", ctypes.c_float),
        ("rounds_last", ctypes.c_int32),
    ]


class Rotate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "x_stride", "head_stride", "rotary_size")),
    ]


class Gate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "x_stride", "activation")),
    ]


class Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("table", "indices", "out")),
        *((name, ctypes.c_int64) for name in ("count", "size")),
        ("scale", ctypes.c_float),
    ]


class Choose(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "correction", "ids", "weights")),
        *((name, ctypes.c_int64) for name in ("tokens", "experts", "top_k", "groups", "top_groups")),
        *((name, ctypes.c_int64) for name in ("is_sigmoid", "normalises")),
        ("scale", ctypes.c_float),
    ]


class Scale(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "size", "x_stride")),
        ("factor", ctypes.c_float),
    ]


class Place(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("part", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "row_bytes", "out_stride")),
    ]


class CpuOperators(Operators):
    """Fused kernels, run by the worker's threads."""

    names: ClassVar = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

    def __init__(self, context: OperatorContext) -> None:
        super().__init__(context)
        library, suffix = native.load(SOURCE), self.names[context.dtype]
        self._norm, self._rotate, self._gate, self._rows, self._scale = (
            operator(library, f"{name}_{suffix}") for name in ("norm", "rotate", "gate", "rows", "scale")
        )
        self._place = operator(library, "place")
        self._choose = {dtype: operator(library, f"choose_{name}") for dtype, name in self.names.items()}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False) -> Tensor:
        return self._normed(x, None, weight, eps, rounds_last)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False
    ) -> Tensor:
        if not residual.is_contiguous():
            raise ValueError("the residual stream must be contiguous")
        return self._normed(x, residual, weight, eps, rounds_last)

    def _normed(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rounds_last: bool) -> Tensor:
        x = self._rows_together(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        size = x.shape[-1]
        args = Norm(
            *(x.data_ptr(), None if residual is None else residual.data_ptr(), out.data_ptr(), weight.data_ptr()),
            *(x.shape[0], x.shape[1] if x.dim() == 3 else 1, size, x.stride(0), weight.numel() // size),
            *(eps, rounds_last),
        )
        self.context.threads.run(self._norm, args, is_small=x.numel() <= SMALL)
        return out

    def choose_experts(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        ids = torch.empty(len(logits), routing.top_k, dtype=torch.int64)
        weights = torch.empty(len(logits), routing.top_k, dtype=torch.float32)
        args = Choose(
            *(logits.data_ptr(), None if correction is None else correction.data_ptr()),
            *(ids.data_ptr(), weights.data_ptr(), *logits.shape, routing.top_k),
            *(routing.num_groups, routing.top_groups, routing.is_sigmoid, routing.normalises, routing.scale),
        )
        self.context.threads.run(self._choose[logits.dtype], args, is_small=logits.numel() <= SMALL // 4)
        return ids, weights

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        if x.stride(2) != 1:
            raise ValueError("the numbers of a head must lie together")
        args = Rotate(
            *(x.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *(x.shape[0], x.shape[1], x.stride(0), x.stride(1), cos.shape[-1]),
        )
        self.context.threads.run(self._rotate, args, is_small=x.numel() <= SMALL)

    def gate(self, x: Tensor, activation: str) -> Tensor:
        if activation not in ACTIVATIONS:
            raise ModelLoadError(
                f"activation {activation!r} is not among those the cpu operators compute ({', '.join(ACTIVATIONS)}): "
                "take --operator-backend torch"
            )
        x = self._rows_together(x)
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
        args = Gate(x.data_ptr(), out.data_ptr(), *out.shape, x.stride(0), ACTIVATIONS[activation])
        self.context.threads.run(self._gate, args, is_small=x.numel() <= SMALL // 4)
        return out

    def rows(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        out = torch.empty((len(indices), *table.shape[1:]), dtype=table.dtype)
        args = Rows(
            *(table.data_ptr(), indices.data_ptr(), out.data_ptr()),
            *(len(indices), math.prod(table.shape[1:]), 1.0 if scale is None else scale),
        )
        self.context.threads.run(self._rows, args, is_small=out.numel() <= SMALL)
        return out

    def scale(self, x: Tensor, factor: float) -> None:
        if x.stride(1) != 1 and x.shape[1] > 1:
            raise ValueError("the numbers of a row must lie together")
        args = Scale(x.data_ptr(), *x.shape, x.stride(0), factor)
        self.context.threads.run(self._scale, args, is_small=x.numel() <= SMALL)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        rows, dtype = parts[0].shape[0], parts[0].dtype
        out = torch.empty(rows, sum(part.shape[1] for part in parts), dtype=dtype)
        stride, start = out.shape[1] * dtype.itemsize, out.data_ptr()
        for part in parts:
            args = Place(part.data_ptr(), start, rows, part.shape[1] * dtype.itemsize, stride)
            self.context.threads.run(self._place, args, is_small=part.numel() <= SMALL)
            start += args.row_bytes
        return out

    @staticmethod
    def _rows_together(x: Tensor) -> Tensor:
        """The same numbers, those of a token in a row."""
        is_together = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
        return x if is_together else x.contiguous()

    def graph_capture(self) -> GraphCapture | None:
        threads = self.context.threads
        return TapeCapture(threads) if isinstance(threads, ThreadPool) else None
