"""Tiles of matrices that are packed, unpacked as they are multiplied; and activations rounded to e4m3."""

from __future__ import annotations

import triton
import triton.language as tl

from fwk_tiles.numbers import rounded

PLAIN, INT8, INT4, E4M3 = (tl.constexpr(i) for i in range(4))
"""``FORMAT`` of a kernel: how a matrix holds its numbers; plain ones have no scales."""

FORMATS = {"int8": INT8, "int4": INT4, "e4m3": E4M3}
"""By ``fwk.interfaces.quant.PackedNumbers.kind``."""


@triton.jit
def matrix_tile(
    numbers,  # of the expert; bytes unless plain
    scales,
    zeros,
    row,  # [rows] int64
    is_row,
    at,  # the first column
    COLUMNS: tl.constexpr,  # of the matrix
    STEP: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    dtype: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """[rows, STEP] of a matrix, as dtype. Not scaled where a row has one scale: then its products are."""
    k = at + tl.arange(0, STEP)
    mask = is_row[:, None] & (k < COLUMNS)[None, :]
    if FORMAT == PLAIN:
        found = tl.load(numbers + row[:, None] * COLUMNS + k[None, :], mask=mask, other=0.0)
    else:
        if FORMAT == INT4:
            HALF: tl.constexpr = COLUMNS // 2
            if HALF % STEP == 0:
                byte = tl.load(numbers + row[:, None] * HALF + (at % HALF + tl.arange(0, STEP))[None, :])
                value = ((byte.to(tl.int32) >> (at // HALF * 4)) & 15).to(tl.float32)
            else:
                byte = tl.load(numbers + row[:, None] * HALF + (k % HALF)[None, :], mask=mask, other=0)
                value = ((byte.to(tl.int32) >> (k // HALF * 4)[None, :]) & 15).to(tl.float32)
        else:
            byte = tl.load(numbers + row[:, None] * COLUMNS + k[None, :], mask=mask, other=0)
            if FORMAT == E4M3:  # sign, exponent and fraction move to their places in a float32
                bits = byte.to(tl.int8, bitcast=True).to(tl.int32) << 20
                value = (bits & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** (127 - 7)
            else:
                value = byte.to(tl.int8, bitcast=True).to(tl.float32)
        if GROUP % STEP == 0:  # one group for each row of the tile
            group, is_number = at // GROUP + tl.arange(0, 1)[None, :], is_row[:, None]
        else:
            group, is_number = (k // GROUP)[None, :], mask
        if HAS_ZEROS:
            value -= tl.load(zeros + row[:, None] * GROUPS + group, mask=is_number, other=0).to(tl.float32)
        elif FORMAT == INT4:
            value -= 8.0
        if GROUPS > 1 or HAS_ZEROS:
            scale = tl.load(scales + row[:, None] // ROW_BLOCK * GROUPS + group, mask=is_number, other=0.0)
            value *= scale.to(tl.float32)
        found = rounded(value, dtype, IS_INTERPRETED)
    return found


@triton.jit
def e4m3_bytes(y):
    """Numbers within +-448 to the nearest of e4m3 (ties to even): sign, 4 bits of exponent, 3 of fraction."""
    size = tl.abs(y)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponents are counted from -7, not from -127
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 15  # below 2**-6 it is a multiple of 2**-9
    return (tl.where(size < 0.015625, small, normal) | ((y < 0.0).to(tl.int32) << 7)).to(tl.uint8)


@triton.jit
def scale_of(largest):
    """Of numbers that are to become e4m3 and whose largest is this; infinite if one is no number."""
    return tl.maximum(tl.math.div_rn(largest, 448.0), 1e-12)


@triton.jit
def size_of(y):
    """Of a number; infinite if it is none."""
    return tl.where(y == y, tl.abs(y), float("inf"))


@triton.jit
def scaled_bytes(y, scale):
    """Numbers as e4m3, as multiples of their scale; 0 where that is infinite."""
    y = tl.math.div_rn(tl.where(scale < float("inf"), y, 0.0), scale)
    return e4m3_bytes(tl.minimum(tl.maximum(y, -448.0), 448.0))


@triton.jit
def rounded_tile(y, GROUPS: tl.constexpr):
    """A tile [rows, WIDTH] as e4m3 bytes, and scales [rows, GROUPS] of runs of WIDTH / GROUPS."""
    if GROUPS == 1:  # numbers stay where they are
        scales = tl.expand_dims(scale_of(tl.max(size_of(y), 1)), 1)
        found = scaled_bytes(y, scales)
    else:
        groups = tl.reshape(y, (y.shape[0], GROUPS, y.shape[1] // GROUPS))
        scales = scale_of(tl.max(size_of(groups), 2))
        found = tl.reshape(scaled_bytes(groups, tl.expand_dims(scales, 2)), (y.shape[0], y.shape[1]))
    return found, scales


@triton.jit
def round_rows(
    x,  # [num_rows, SIZE]
    x_stride,
    numbers,  # [num_rows, SIZE]: bytes
    scales,  # [num_rows, GROUPS] float32
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """One group of a row as e4m3 numbers and their scale: the largest becomes 448.

    A number that is none, or infinite, makes the scale infinite, and so what is computed with it.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * GROUP
    end = tl.minimum(first + GROUP, SIZE)
    largest = tl.zeros((WIDTH,), tl.float32)
    for at in range(first, end, WIDTH):
        column = at + tl.arange(0, WIDTH)
        y = tl.load(x + row * x_stride + column, mask=column < end, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, size_of(y))
    scale = scale_of(tl.max(largest, 0))
    tl.store(scales + row * GROUPS + group, scale)
    for at in range(first, end, WIDTH):
        column = at + tl.arange(0, WIDTH)
        y = tl.load(x + row * x_stride + column, mask=column < end, other=0.0).to(tl.float32)
        tl.store(numbers + row * SIZE + column, scaled_bytes(y, scale), mask=column < end)


@triton.jit
def rounded_products(
    given,  # [ROWS, STEP]: bytes of e4m3 numbers
    of_given,  # [ROWS] pointers to the scales of their first groups
    is_given,
    numbers,  # of the expert: bytes
    scales,
    row,  # [rows] int64
    is_row,
    at,  # the first column
    COLUMNS: tl.constexpr,  # of the matrix
    STEP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """[ROWS, rows] products of STEP e4m3 numbers each. Not scaled where a row has one scale: then their sums are."""
    tl.static_assert(GROUPS == 1 or GROUP % STEP == 0)
    k = at + tl.arange(0, STEP)
    byte = tl.load(
        numbers + row[:, None] * COLUMNS + k[None, :], mask=is_row[:, None] & (k < COLUMNS)[None, :], other=0
    )
    # Sums longer than this one are added up in float32: matrix units keep fewer bits of those of e4m3 numbers.
    found = tl.dot(given.to(tl.float8e4nv, bitcast=True), tl.trans(byte.to(tl.float8e4nv, bitcast=True)))
    if GROUPS > 1:
        of_rows = tl.load(scales + row // ROW_BLOCK * GROUPS + at // GROUP, mask=is_row, other=0.0)
        found *= tl.load(of_given + at // GROUP, mask=is_given, other=0.0)[:, None] * of_rows[None, :]
    return found
