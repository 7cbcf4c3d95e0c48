"""Launches the kernels: one for few tokens, two where parts are added or inputs rounded; many are torch's product."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton

from fwk.interfaces.quant import PackedNumbers, RoundedRows
from fwk_quant._linear_triton import kernels
from fwk_tiles.launches import Tile, form_of, rounded_inputs
from fwk_tiles.matrices import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

FEW_TOKENS = 64
"""Up to here a matrix is unpacked as it is multiplied, beyond once for all of them: torch's product then gains more."""

PROGRAMS = 256
"""Two for each multiprocessor of a large device: with fewer, the sum over the inputs is shared among programs."""

MAX_PARTS = 8

COLUMNS = 64

NUMBERS = 1024
"""Of a sum of parts in one program: eight for each of 128 threads."""


def tile_of(num_tokens: int, itemsize: int, kind: str, *, is_amd: bool) -> Tile:
    """itemsize: of a number of x as the kernel reads it. Sums of many rows in float32 do not fit the registers.

    Tiles of int4 with few rows have half the columns: too small for a warpgroup, they are multiplied out of registers,
    where Triton 3.6 has no room for 64 columns (25 numbers of a thread in local memory for sm_80, 18 for sm_90). AMD's
    twice as many threads have it, and would read half as many bytes at once.
    """
    rows = 16 if num_tokens <= 16 or itemsize == 4 else 32 if num_tokens <= 32 else 64
    columns = COLUMNS // 2 if kind == "int4" and rows < 64 and not is_amd else COLUMNS
    return Tile(rows, columns, step=128 // itemsize, num_warps=4, num_stages=3)


def parts_of(outputs: int, inputs: int, step: int) -> tuple[int, int]:
    """Among how many programs a sum is shared, and the inputs of each: by the matrix alone, whatever the tokens."""
    wanted = -(-PROGRAMS // -(-outputs // COLUMNS))
    steps = -(-inputs // step)
    span = -(-steps // min(wanted, MAX_PARTS, max(1, steps // 4))) * step
    return -(-inputs // span), span


class TritonMatrix:
    """A packed matrix as the kernels read it."""

    def __init__(self, packed: PackedNumbers, size: tuple[int, int], order: Tensor | None = None) -> None:
        """size: outputs and inputs; order: [inputs] int64, the input at each place."""
        scales, zeros = packed.scales.contiguous(), None if packed.zeros is None else packed.zeros.contiguous()
        self.packed = replace(packed, numbers=packed.numbers.contiguous(), scales=scales, zeros=zeros)
        self.size, self.order = size, order
        (outputs, inputs), groups, has_zeros = size, scales.shape[1], zeros is not None
        self._group = min(packed.group_size, inputs)
        form = form_of(FORMATS[packed.kind].value, groups, self._group, packed.row_block, has_zeros=has_zeros)
        self._constants = {"INPUTS": inputs, "OUTPUTS": outputs, **form}
        numbers = self.packed.numbers.view(torch.uint8)  # not every device that Triton compiles for reads e4m3
        self._tensors = (numbers, scales, scales if zeros is None else zeros)
        self._scales_products = groups == 1 and not has_zeros  # the kernels leave a row's one scale out

    @staticmethod
    def is_for(x: Tensor | RoundedRows) -> bool:
        """Whether x has so few rows that its product is theirs."""
        return x.shape[0] <= FEW_TOKENS

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, inputs] to [num_tokens, outputs]."""
        x = x if self.order is None else x[:, self.order]
        x = x if x.stride(1) == 1 else x.contiguous()
        if not x.shape[0]:
            return x.new_empty(0, self.size[0])
        if not self.is_for(x) and not self.packed.rounds_input:
            return self._product_of_many(x, bias)
        return self._product(x, bias)

    def apply_rounded(self, x: RoundedRows, bias: Tensor | None) -> Tensor:
        """As ``apply``, of e4m3 numbers in groups as the matrix has them."""
        if not x.shape[0]:
            return torch.empty(0, self.size[0], dtype=x.dtype, device=x.numbers.device)
        return self._product_of(x.numbers.view(torch.uint8), x.scales, x.dtype, bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        given, of_x = x, x
        if self.packed.rounds_input:
            given, of_x = rounded_inputs(x, self.packed.scales.shape[1], self._group, _launch)
        return self._product_of(given, of_x, x.dtype, bias)

    def _product_of(self, x: Tensor, of_x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        (outputs, inputs), num_tokens = self.size, x.shape[0]
        tile = tile_of(num_tokens, x.element_size(), self.packed.kind, is_amd=torch.version.hip is not None)
        parts, span = parts_of(outputs, inputs, tile.step)
        shape, kind = ((num_tokens, outputs), dtype) if parts == 1 else ((parts, num_tokens, outputs), torch.float32)
        out = torch.empty(shape, dtype=kind, device=x.device)
        given = x if bias is None else bias
        _launch(
            kernels.packed_products,
            (triton.cdiv(outputs, tile.columns), parts, triton.cdiv(num_tokens, tile.rows)),
            x,
            x.stride(0),
            of_x,
            *self._tensors,
            given,
            out,
            num_tokens,
            **self._constants,
            ROUNDS=self.packed.rounds_input,
            HAS_BIAS=bias is not None,
            PARTS=parts,
            SPAN=span,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            STEP=tile.step,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if parts == 1:
            return out
        y = torch.empty(num_tokens, outputs, dtype=dtype, device=x.device)
        sizes = {"OUTPUTS": outputs, "PARTS": parts, "HAS_BIAS": bias is not None, "WIDTH": NUMBERS}
        grid = (num_tokens, triton.cdiv(outputs, NUMBERS))
        _launch(kernels.add_parts, grid, out, y if bias is None else bias, y, num_tokens, **sizes)
        return y

    def _product_of_many(self, x: Tensor, bias: Tensor | None) -> Tensor:
        outputs, inputs = self.size
        dense = x.new_empty(outputs, inputs)
        step = 128
        grid = (triton.cdiv(outputs, 32), triton.cdiv(inputs, step))
        _launch(kernels.unpack_tiles, grid, *self._tensors, dense, **self._constants, ROWS=32, STEP=step)
        if not self._scales_products:
            return F.linear(x, dense, bias)
        of_rows = self.packed.scales.view(-1).float()
        if self.packed.row_block > 1:
            of_rows = of_rows.repeat_interleave(self.packed.row_block)[:outputs]
        y = F.linear(x, dense).mul_(of_rows)
        return y if bias is None else y.add_(bias)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Arguments of a kernel are what its decorator makes of them: no type checker knows it."""
    kernel[grid](*arguments, **constants, IS_INTERPRETED=not arguments[0].is_cuda)
