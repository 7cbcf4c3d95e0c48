"""Matrices of integers in groups for the native kernel, which rounds activations to 8 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import fwk_native as native
from fwk_native.thread_pool import operator
from fwk_quant._linear_cpu.kernel import SMALL, TOO_MANY_INPUTS, Header, LinearKernel, PackedMatrix
from fwk_quant._linear_cpu.packing import PANEL, Packing

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.native import NativeThreads

ROUNDED_TOGETHER = 64
"""Inputs whose activations share a scale, where groups of weights are no smaller."""

FORMATS = {8: 2, 4: 3, 6: 4, 5: 5}
"""By bits: ``Format`` of ``matrix.h``."""

PACKED_AT_ONCE = 1 << 20
"""Numbers on their way into panels: so few that they, and what they are made of, stay in the second cache."""

INPUTS_A_STEP = {8: 4, 4: 8, 6: 16, 5: 32}
"""By bits: inputs whose integers a kernel reads at once."""

CONSTANT, BYTES, OFFSETS = range(3)
SINGLE, HALF, NESTED = range(3)


class Nested(NamedTuple):
    """Products: of ``factors`` [rows, entries / size] float16, each for ``size`` of ``bytes`` [rows, entries] int8."""

    factors: Tensor
    bytes: Tensor

    @property
    def size(self) -> int:
        """Entries that share a factor."""
        return self.bytes.shape[1] // self.factors.shape[1]


@dataclass(frozen=True, slots=True)
class Integers:
    """Unsigned integers q [rows, columns] uint8 of ``bits`` bits; ``group`` neighbours in a row share a scale s.

    Their value is s (q - ``zero``), where zero is one number or, by group, [rows, groups] uint8; or s q + o, where
    ``offsets`` are given. Scales and offsets are [rows, groups] float16 or float32, or nested.
    """

    bits: int
    numbers: Tensor
    group: int
    scales: Tensor | Nested
    zero: int | Tensor = 0
    offsets: Tensor | Nested | None = None

    def rows(self, start: int, stop: int) -> Integers:
        """Some of the rows."""

        def cut(x: Tensor | Nested) -> Tensor | Nested:
            return Nested(x.factors[start:stop], x.bytes[start:stop]) if isinstance(x, Nested) else x[start:stop]

        return replace(
            self,
            numbers=self.numbers[start:stop],
            scales=cut(self.scales),
            zero=self.zero if isinstance(self.zero, int) else self.zero[start:stop],
            offsets=None if self.offsets is None else cut(self.offsets),
        )


def rounded_together(bits: int, columns: int, group: int) -> int | None:
    """Inputs whose activations share a scale in the kernel, or None where it does not do such groups."""
    size = min(group, columns)
    if size == columns or size % ROUNDED_TOGETHER == 0:
        size = ROUNDED_TOGETHER
    return size if size <= ROUNDED_TOGETHER and size % INPUTS_A_STEP[bits] == 0 else None


class _Gather(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y", "inputs")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_stride", "is_bfloat16")),
    ]


class IntegerKernel(LinearKernel):
    """Matrices of integers of 4, 5, 6 and 8 bits."""

    source = Path(__file__).with_name("integers.cpp")

    def __init__(self, threads: NativeThreads, instructions: str | None = None) -> None:
        super().__init__(threads, instructions)
        self._gather = operator(native.load(self.source, instructions), "linear_gather")
        self._may_be_fine = native.has_tiles(instructions or native.isa())

    def apply(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        fits = x.dim() == 2 and x.shape[1] == matrix.size[1] and x.dtype in matrix.dtypes
        if matrix.inputs is not None and fits:
            x = self._gathered(x, matrix.inputs)
        return super().apply(matrix, x, bias)

    def rows(self, matrix: PackedMatrix, indices: Tensor, dtype: torch.dtype) -> Tensor:
        found = super().rows(matrix, indices, dtype)
        return found if matrix.inputs is None else torch.empty_like(found).index_copy_(1, matrix.inputs, found)

    def _gathered(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Columns of x as a matrix wants them."""
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        call = _Gather(
            *(x.data_ptr(), y.data_ptr(), inputs.data_ptr(), *x.shape, x.stride(0), x.dtype == torch.bfloat16)
        )
        self._threads.run(self._gather, call, is_small=y.numel() < SMALL)
        return y

    def int16_activations(self, matrix: Integers) -> bool:
        """Whether activations are rounded to 16 bits with one scale for a token (``int16_activations.h``)."""
        columns = matrix.numbers.shape[1]
        is_plain = matrix.offsets is None and isinstance(matrix.zero, int)
        is_whole = columns <= matrix.group and columns < TOO_MANY_INPUTS
        return self._may_be_fine and matrix.bits == 8 and is_plain and is_whole

    def pack(self, matrix: Integers) -> PackedMatrix:
        """What ``rounded_together`` allows."""
        rows, columns = matrix.numbers.shape
        return self.pack_slices(rows, columns, matrix.rows)

    def pack_slices(self, num_rows: int, columns: int, make: Callable[[int, int], Integers]) -> PackedMatrix:
        """The same of a matrix whose rows ``make(start, stop)`` makes, ``PACKED_AT_ONCE`` numbers at a time.

        All slices are of one form: bits, group, and which types scales, zeros and offsets have.
        """
        step = max(PANEL, PACKED_AT_ONCE // max(columns, 1) // PANEL * PANEL)
        first = make(0, min(step, num_rows))
        group = rounded_together(first.bits, columns, first.group)
        assert group is not None, "groups the kernel does not do"
        pieces = _pieces(self.packing, first, group)
        panels = [self.packing.empty(piece, num_rows) for piece in pieces]
        for start in range(0, num_rows, step):
            if start:
                pieces = _pieces(self.packing, make(start, min(start + step, num_rows)), group)
            for to, piece in zip(panels, pieces, strict=True):
                self.packing.fill(to, piece, start)
        return self._matrix(first, (num_rows, columns), group, panels)

    def _matrix(self, form: Integers, size: tuple[int, int], group: int, panels: list[Tensor]) -> PackedMatrix:
        words, *others = panels
        num_scales = len(_factors(form.scales))
        header = Header(
            words=words.data_ptr(),
            out_features=size[0],
            in_features=size[1],
            num_words=words.shape[1],
            format=FORMATS[form.bits],
            group=group,
            scale_every=max(1, -(-min(form.group, size[1]) // group)),
            nest=form.scales.size if isinstance(form.scales, Nested) else 1,
            int16_activations=self.int16_activations(form),
            scale_kind=_kind(form.scales),
        )
        header.scales, header.scale_bytes = _addresses(others[:num_scales])
        header.zeros, header.zero_bytes = _addresses(others[num_scales:])
        if form.offsets is not None:
            assert _kind(form.offsets) == header.scale_kind, "scales and offsets are stored alike"
            header.zero_kind = OFFSETS
        elif isinstance(form.zero, int):
            header.zero_kind, header.zero = CONSTANT, form.zero
        else:
            header.zero_kind = BYTES
        return PackedMatrix(words, size, (torch.float32, torch.bfloat16), header, tuple(others))


def _pieces(packing: Packing, matrix: Integers, group: int) -> list[Tensor]:
    """What is packed of some rows: words, scales, and zeros or offsets by group."""
    words = packing.integer_words(matrix.numbers, matrix.bits, group)
    found = [words, *_factors(matrix.scales)]
    if matrix.offsets is not None:
        return [*found, *_factors(matrix.offsets)]
    return found if isinstance(matrix.zero, int) else [*found, matrix.zero]


def _factors(numbers: Tensor | Nested) -> list[Tensor]:
    if isinstance(numbers, Nested):
        return [numbers.factors, numbers.bytes]
    return [numbers if numbers.dtype == torch.float16 else numbers.float()]


def _kind(numbers: Tensor | Nested) -> int:
    if isinstance(numbers, Nested):
        return NESTED
    return HALF if numbers.dtype == torch.float16 else SINGLE


def _addresses(tensors: list[Tensor]) -> tuple[int | None, int | None]:
    found = [x.data_ptr() for x in tensors] + [None, None]
    return found[0], found[1]
