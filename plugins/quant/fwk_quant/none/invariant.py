"""Products on a device whose bits for a row of x do not depend on the other rows (He et al. 2025).

torch chooses tiles, and how many programs share the sum over the inputs, by the number of rows. Here one program makes
a number, from tiles of one size, and adds up the inputs in their order: a matrix unit adds nothing of a tile's other
rows to a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from fwk_tiles.launches import Tile

if TYPE_CHECKING:
    from torch import Tensor


def tile_of(itemsize: int) -> Tile:
    """By the size of a number alone. Larger ones in float32, which no matrix unit multiplies, leave the registers."""
    if itemsize == 4:
        return Tile(rows=16, columns=64, step=32, num_warps=4, num_stages=3)
    return Tile(rows=64, columns=64, step=64, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["num_rows"])
def linear_tiles(
    x,
    x_stride,
    weight,  # [out_features, in_features]
    weight_stride,
    bias,  # [out_features], or anything without HAS_BIAS
    out,  # [num_rows, out_features]
    num_rows,
    out_features,
    in_features,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """x @ weight.T + bias, added up in float32 and rounded once."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < out_features
    of_row = x + row.to(tl.int64)[:, None] * x_stride
    of_column = weight + column.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, in_features, STEP):
        k = at + tl.arange(0, STEP)
        is_input = (k < in_features)[None, :]
        given = tl.load(of_row + k[None, :], mask=is_row[:, None] & is_input, other=0.0)
        factors = tl.load(of_column + k[None, :], mask=is_column[:, None] & is_input, other=0.0)
        if IS_INTERPRETED:  # its dot would multiply the bits of bfloat16 numbers
            given, factors = given.to(tl.float32), factors.to(tl.float32)
        total = tl.dot(given, tl.trans(factors), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_INTERPRETED and out.dtype.element_ty == tl.bfloat16:  # it cuts bits off, where a device rounds
        bits = total.to(tl.int32, bitcast=True)
        total = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    target = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [num_rows, in_features] to [num_rows, out_features]; weight: [out_features, in_features]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, out_features)
    tile = tile_of(x.element_size())
    # Programs next to each other read the same rows of x, and neighbouring ones of the weight.
    grid = (triton.cdiv(out_features, tile.columns), triton.cdiv(num_rows, tile.rows))
    _launch(
        linear_tiles,
        grid,
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        weight if bias is None else bias,
        out,
        num_rows,
        out_features,
        in_features,
        HAS_BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEP=tile.step,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Arguments of a kernel are what its decorator makes of them: no type checker knows it."""
    if all(grid):
        kernel[grid](*arguments, **constants, IS_INTERPRETED=not arguments[0].is_cuda)
