"""The kernel of linear layers: matrices packed once, and products with them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fwk import native
from fwk.team import Team, operator

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_name("linear.cpp")

PANEL = 32
"""Outputs that are packed together."""

FEW_ROWS = 4
"""Up to here each thread prepares the rows it needs by itself."""

SMALL = 50_000
"""Multiply-adds that one thread does sooner than the others wake up."""

FORMATS = {torch.float32: 0, torch.bfloat16: 1}
"""Of plain matrices."""


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("words", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_features", "in_features", "num_words", "format")),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "x", "y", "bias", "spare")),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "y_stride")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "indices", "y")),
        ("count", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix of ``size`` (out_features, in_features) as the kernel reads it.

    words: [panels, words, PANEL] int32. ``row_bytes``: of a row of x once it is prepared for this matrix.
    """

    words: Tensor
    size: tuple[int, int]
    dtype: torch.dtype
    header: _Matrix
    row_bytes: int


class LinearKernel:
    """Packs matrices and multiplies by them, on the threads of ``team``.

    A row's outcome depends on no other row of the batch, on no number of threads, and on no chance: the same bits come
    out alone or among others.
    """

    def __init__(self, team: Team, instructions: str | None = None) -> None:
        """instructions: one of ``native.isas()``. Raises ``PluginError`` when the kernel cannot be built."""
        self._team = team
        library = native.load(SOURCE, instructions)
        self._operator, self._rows = operator(library, "linear"), operator(library, "linear_rows")
        self._row_bytes = library.linear_row_bytes
        self._row_bytes.argtypes = (ctypes.c_void_p,)
        self._row_bytes.restype = ctypes.c_int64

    def pack(self, weight: Tensor) -> PackedMatrix:
        """weight: [out_features, in_features] float32 or bfloat16, which is not kept."""
        words = pack_words(weight)
        size = (weight.shape[0], weight.shape[1])
        header = _Matrix(words.data_ptr(), *size, words.shape[1], FORMATS[weight.dtype])
        return PackedMatrix(words, size, weight.dtype, header, self._row_bytes(ctypes.addressof(header)))

    def apply(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] in the matrix' dtype to [num_tokens, out_features]; sums are float32.

        Raises ``ValueError`` for another shape or dtype.
        """
        out_features, in_features = matrix.size
        if x.dim() != 2 or x.shape[1] != in_features or x.dtype != matrix.dtype:
            raise ValueError(
                f"a matrix of {in_features} inputs in {matrix.dtype} was given {tuple(x.shape)} in {x.dtype}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
            bias = bias.to(x.dtype).contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, out_features, dtype=x.dtype)
        spare = torch.empty(rows * matrix.row_bytes if rows > FEW_ROWS else 0, dtype=torch.uint8)
        call = _Linear(
            ctypes.addressof(matrix.header),
            x.data_ptr(),
            y.data_ptr(),
            None if bias is None else bias.data_ptr(),
            spare.data_ptr(),
            rows,
            x.stride(0),
            out_features,
        )
        self._team.run(self._operator, call, is_small=rows * out_features * in_features < SMALL)
        return y

    def rows(self, matrix: PackedMatrix, indices: Tensor) -> Tensor:
        """indices: [n] int64 to rows of the matrix as they were before it was packed, [n, in_features]."""
        y = torch.empty(len(indices), matrix.size[1], dtype=matrix.dtype)
        call = _Rows(ctypes.addressof(matrix.header), indices.data_ptr(), y.data_ptr(), len(indices))
        self._team.run(self._rows, call, is_small=y.numel() < SMALL)
        return y


def pack_words(weight: Tensor) -> Tensor:
    """[rows, columns] of 4, 2 or 1 bytes to words of neighbouring columns, [panels, words, PANEL] int32.

    Zeros fill the last word of each row and the rows of the last panel.
    """
    per_word = 4 // weight.element_size()
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % per_word, 0, -rows % PANEL)).contiguous()
    return padded.view(torch.int32).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
