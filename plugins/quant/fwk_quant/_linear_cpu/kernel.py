"""Linear layers by native kernels: matrices packed once, and products with them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, ClassVar

import torch

import fwk_native as native
from fwk.interfaces.native import NativeLinear
from fwk_native.thread_pool import ThreadPool, operator
from fwk_quant._linear_cpu.packing import PANEL, Packing

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.native import NativeThreads

MAX_FEW_ROWS = 4
"""Up to here each thread always prepares the rows it needs by itself."""

WORDS_A_STEP = 16
"""Words of a row of floats that AMX multiplies at once: rows are filled up to a multiple."""

SIDE = 16
"""Of more rows, those that may be prepared side by side: there is room for a whole number of these."""

BF12 = 6
"""The format of bfloat16 in 12 bits."""

BF12_INPUTS, BF12_WORDS = 32, 12
"""Inputs that are packed as a whole there, and into how many words: so many that AMX could multiply them, too."""

RARE = 512
"""One weight of so many may have an exponent far below the others of its output: each is looked after by itself."""

TOO_MANY_INPUTS = 2**16
"""Inputs from which sums of products with 8-bit integers would not fit into 32 bits."""

MIN_SLICE = 8
"""Panels of a slice, at least: each slice prepares the rows anew."""

SMALL = 50_000
"""Multiply-adds that one thread does sooner than the others wake up."""


class Header(ctypes.Structure):
    """``Matrix`` of ``matrix.h``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "scales", "zeros", "scale_bytes", "zero_bytes")),
        *((name, ctypes.c_int64) for name in ("out_features", "in_features", "num_words", "format")),
        *((name, ctypes.c_int64) for name in ("group", "scale_every", "nest", "scale_kind", "zero_kind", "zero")),
        *((name, ctypes.c_void_p) for name in ("exponents", "rare_starts", "rare")),
        ("int16_activations", ctypes.c_int64),
    ]


class LinearCall(ctypes.Structure):
    """``Linear`` of ``matrix.h``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "x", "y", "bias", "scratch")),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "y_stride", "is_bfloat16")),
    ]


Call = tuple[int, ctypes.Structure]
"""An operator and its arguments."""


class _Screen(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "words", "scales", "errors")),
        ("num_words", ctypes.c_int64),
    ]


class _Largest(ctypes.Structure):
    _fields_ = [("linear", LinearCall), *((name, ctypes.c_void_p) for name in ("screen", "is_greedy", "bounds"))]


class _Compress(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_features", "in_features", "stride", "num_words")),
        *((name, ctypes.c_void_p) for name in ("exponents", "rare_counts", "words", "rare_starts", "rare")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "indices", "y")),
        *((name, ctypes.c_int64) for name in ("count", "is_bfloat16")),
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix of ``size`` (out_features, in_features) as a kernel reads it.

    words: [panels, words, PANEL] int32. ``scales`` and the like: of integers, [panels, entries, PANEL] each.
    inputs: [in_features] int64, of integers: the input that each column is for; None: columns are in the inputs' order.
    """

    words: Tensor
    size: tuple[int, int]
    dtypes: tuple[torch.dtype, ...]
    header: Header
    scales: tuple[Tensor, ...] = ()
    inputs: Tensor | None = None

    def header_from(self, panel: int) -> Header:
        """The header of a matrix that begins with so many panels' less."""
        header = Header.from_buffer_copy(self.header)
        header.words += panel * self.words.stride(0) * self.words.itemsize
        steps = {x.data_ptr(): panel * x.numel() // len(self.words) * x.itemsize for x in self.scales if x.numel()}
        for name in ("scales", "zeros", "scale_bytes", "zero_bytes", "exponents"):
            address = getattr(header, name)
            if address is not None:
                setattr(header, name, address + steps[address])
        if header.rare_starts is not None:
            header.rare_starts += panel * 8
        return header


@dataclass(frozen=True, slots=True)
class ScreenedMatrix:
    """A matrix, and its numbers again in 8 bits, with bounds of what that takes away (``screen.h``).

    The screen is made by a thread of its own, which mostly waits for memory, alongside the rest of a start.
    is_greedy: [1] int64, which holds 1 in steps that need no output but the largest of each row.
    """

    matrix: PackedMatrix
    header: ctypes.Structure
    screen: tuple[Tensor, ...]
    maker: Thread
    is_greedy: Tensor
    max_rows: int

    def bytes_read(self, num_rows: int) -> int | None:
        """Bytes of weights that a greedy step of so many rows reads at least; None: those of the matrix."""
        if num_rows > self.max_rows:
            return None
        return sum(piece.numel() * piece.element_size() for piece in self.screen)


class LinearKernel:
    """Multiplies by packed matrices on the threads of ``threads``.

    Deterministic and batch-invariant: a row's result has the same bits alone and in any batch, on any number of
    threads.
    """

    source: ClassVar[Path]

    def __init__(self, threads: NativeThreads, instructions: str | None = None) -> None:
        """instructions: one of ``native.testable_isas()``. Raises ``PluginError`` when the kernel cannot be built."""
        self._threads = threads
        self.packing = Packing(threads, instructions)
        library = native.load(self.source, instructions)
        self._operator = operator(library, "linear")
        self._rows = operator(library, "linear_rows")
        self._row_bytes = library.linear_row_bytes
        self._row_bytes.argtypes = (ctypes.c_void_p,)
        self._row_bytes.restype = ctypes.c_int64

    def apply(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] in one of the matrix' dtypes to [num_tokens, out_features] in the same.

        Sums are float32, and rounded once. Raises ``ValueError`` for another shape or dtype.
        """
        return self._multiply(matrix, x, bias, lambda call: (self._operator, call))

    def _multiply(
        self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, as_call: Callable[[LinearCall], Call]
    ) -> Tensor:
        """``apply`` by the operator, and with the arguments, that ``as_call`` makes of a linear layer's."""
        out_features, in_features = matrix.size
        if x.dim() != 2 or x.shape[1] != in_features or x.dtype not in matrix.dtypes:
            raise ValueError(
                f"a matrix of {in_features} inputs for {' or '.join(map(str, matrix.dtypes))} was given "
                f"{tuple(x.shape)} in {x.dtype}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
            bias = bias.to(x.dtype).contiguous()
        rows, header = x.shape[0], ctypes.addressof(matrix.header)
        y = torch.empty(rows, out_features, dtype=x.dtype)
        prepared = (rows + SIDE - 1) // SIDE * SIDE if rows > MAX_FEW_ROWS else 0
        scratch = torch.empty(prepared * self._row_bytes(header), dtype=torch.uint8)
        call = LinearCall(
            *(header, x.data_ptr(), y.data_ptr(), None if bias is None else bias.data_ptr(), scratch.data_ptr()),
            *(rows, x.stride(0), out_features, x.dtype == torch.bfloat16),
        )
        self._threads.run(*as_call(call), is_small=rows * out_features * in_features < SMALL)
        return y

    def slices(self, matrix: PackedMatrix, count: int) -> list[NativeLinear]:
        """Of about as many outputs each, whole panels; few outputs are not divided further."""
        panels = len(matrix.words)
        step = max(MIN_SLICE, -(-panels // count))
        found: list[NativeLinear] = []
        for first in range(0, panels, step):
            header = matrix.header_from(first)
            header.out_features = min(step * PANEL, matrix.size[0] - first * PANEL)
            address = ctypes.addressof(header)
            found.append(
                NativeLinear(
                    operator=self._operator,
                    matrix=address,
                    row_bytes=self._row_bytes(address),
                    first=first * PANEL,
                    out_features=header.out_features,
                    kept=(matrix, header),
                )
            )
        return found

    def rows(self, matrix: PackedMatrix, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """indices: [n] int64 to rows of the matrix as they were before it was packed, [n, in_features].

        dtype: one of the matrix'; integers are computed in float32 and rounded once.
        """
        y = torch.empty(len(indices), matrix.size[1], dtype=dtype)
        call = _Rows(
            *(ctypes.addressof(matrix.header), indices.data_ptr(), y.data_ptr(), len(indices)), dtype == torch.bfloat16
        )
        self._threads.run(self._rows, call, is_small=y.numel() < SMALL)
        return y


class FloatKernel(LinearKernel):
    """Matrices of float32 and bfloat16, as they are."""

    source = Path(__file__).with_name("floats.cpp")
    formats: ClassVar = {torch.float32: 0, torch.bfloat16: 1}

    def __init__(self, threads: NativeThreads, instructions: str | None = None, *, shortens: bool = True) -> None:
        """shortens: keep bfloat16 in 12 bits a number, without loss, where the instruction set is fast at it."""
        super().__init__(threads, instructions)
        self.shortens = shortens
        library = native.load(self.source, instructions)
        self._compress = operator(library, "linear_compress") if shortens and library.linear_has_bf12() else None
        self._screen = operator(library, "linear_screen")
        self._largest = operator(library, "linear_largest")
        self.screened_rows: int = library.linear_screened_rows()

    def pack(self, weight: Tensor) -> PackedMatrix:
        """weight: [out_features, in_features] of one of ``formats``, which is not kept."""
        packed = self._pack_bf12(weight) if self._compress is not None and weight.dtype == torch.bfloat16 else None
        if packed is not None:
            return packed
        words = self.packing.words(weight, WORDS_A_STEP * 4 // weight.element_size())
        size = (weight.shape[0], weight.shape[1])
        header = Header(
            words=words.data_ptr(),
            out_features=size[0],
            in_features=size[1],
            num_words=words.shape[1],
            format=self.formats[weight.dtype],
        )
        return PackedMatrix(words, size, (weight.dtype,), header)

    def screened(self, matrix: PackedMatrix, is_greedy: Tensor) -> ScreenedMatrix | None:
        """A matrix for ``largest``; None where that would not be sooner done than ``apply``."""
        if not self.screened_rows or matrix.size[1] >= TOO_MANY_INPUTS:
            return None
        panels, num_words = -(-matrix.size[0] // PANEL), -(-matrix.size[1] // 4)
        words = self.packing.pages.empty((panels, num_words, PANEL), torch.int32)
        scales, errors = torch.empty(2, panels, PANEL).unbind()
        pieces = (words, scales, errors)
        header = _Screen(ctypes.addressof(matrix.header), *(piece.data_ptr() for piece in pieces), num_words)

        def make(*_kept: object) -> None:
            ThreadPool(1).run(self._screen, header)

        maker = Thread(target=make, args=(matrix, pieces), daemon=True)
        maker.start()
        return ScreenedMatrix(matrix, header, pieces, maker, is_greedy, self.screened_rows)

    def largest(self, screened: ScreenedMatrix, x: Tensor) -> Tensor:
        """``apply``, as ``QuantMethod.lm_head`` allows it: in greedy steps of up to ``screened_rows`` rows."""
        screened.maker.join()
        bounds = torch.empty(2, self.screened_rows, len(screened.screen[0]))

        def as_call(call: LinearCall) -> Call:
            header, flag = ctypes.addressof(screened.header), screened.is_greedy.data_ptr()
            return self._largest, _Largest(call, header, flag, bounds.data_ptr())

        return self._multiply(screened.matrix, x, None, as_call)

    def _pack_bf12(self, weight: Tensor) -> PackedMatrix | None:
        """bfloat16 in 12 bits a number (``bf12.h``); None where too many do not fit."""
        assert self._compress is not None
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        size = (weight.shape[0], weight.shape[1])
        panels, num_words = -(-size[0] // PANEL), -(-size[1] // BF12_INPUTS) * BF12_WORDS
        exponents = self.packing.pages.empty((panels, PANEL), torch.int16)
        starts = torch.zeros(panels + 1, dtype=torch.int64)
        call = _Compress(
            *(weight.data_ptr(), *size, weight.stride(0), num_words, exponents.data_ptr(), starts[1:].data_ptr()),
        )
        self._threads.run(self._compress, call)
        starts = starts.cumsum(0)
        if int(starts[-1]) * RARE > weight.numel():
            return None
        words = self.packing.pages.empty((panels, num_words, PANEL), torch.int32)
        rare = torch.zeros(int(starts[-1]), dtype=torch.int64)
        call.words, call.rare_starts, call.rare = words.data_ptr(), starts.data_ptr(), rare.data_ptr()
        self._threads.run(self._compress, call)
        header = Header(
            words=words.data_ptr(),
            out_features=size[0],
            in_features=size[1],
            num_words=num_words,
            format=BF12,
            exponents=exponents.data_ptr(),
            rare_starts=starts.data_ptr(),
            rare=rare.data_ptr(),
        )
        return PackedMatrix(words, size, (weight.dtype,), header, (exponents, starts, rare))
