"""Norms, rotations, gates and rows of a table, each read and written once. All is computed in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from fwk_tiles.matrices import rounded_tile
from fwk_tiles.numbers import activate, rounded


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x,
    x_token_stride,
    x_head_stride,
    residual,  # [num_rows, SIZE] of x's type, changed in place where ADDS
    weight,
    weight_head_stride,
    out,  # [num_rows, SIZE]; where GROUPS, bytes of e4m3 numbers
    scales,  # [num_rows, SIZE / GROUP rounded up] float32, where GROUPS
    num_rows,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE as a power of two
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    ROUNDS_LAST: tl.constexpr,
    GROUPS: tl.constexpr,  # of WIDTH numbers that are rounded to e4m3; 0: they are not
    IS_INTERPRETED: tl.constexpr,
):
    """x / sqrt(mean(x ** 2) + eps) * weight, of x or of the sum of x and residual."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    source = x + token[:, None] * x_token_stride + head[:, None] * x_head_stride + column[None, :]
    numbers = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    dtype = x.dtype.element_ty
    if ADDS:
        numbers += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        total = rounded(numbers, dtype, IS_INTERPRETED)
        tl.store(residual + place, total, mask=mask)
        numbers = total.to(tl.float32)
    factors = tl.load(weight + head[:, None] * weight_head_stride + column[None, :], mask=mask, other=0.0)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 1) / SIZE + eps)[:, None]
    if not ROUNDS_LAST:
        normed = rounded(normed, dtype, IS_INTERPRETED).to(tl.float32)
    found = rounded(normed * factors.to(tl.float32), dtype, IS_INTERPRETED)
    if GROUPS > 0:
        found, of_groups = rounded_tile(found.to(tl.float32), GROUPS)
        count: tl.constexpr = (SIZE + WIDTH // GROUPS - 1) // (WIDTH // GROUPS)
        group = tl.arange(0, GROUPS)
        is_group = (row < num_rows)[:, None] & (group < count)[None, :]
        tl.store(scales + row.to(tl.int64)[:, None] * count + group[None, :], of_groups, mask=is_group)
    tl.store(out + place, found, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def rotate_rows(
    x,
    x_token_stride,
    x_head_stride,
    cos,
    cos_stride,
    sin,
    sin_stride,
    num_rows,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,  # HALF as a power of two
    ROWS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Turn the first 2 * HALF numbers of each head in place; the first product is rounded."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < num_rows)[:, None] & (column < HALF)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    first = x + token[:, None] * x_token_stride + head[:, None] * x_head_stride + column[None, :]
    of_cos = cos + token[:, None] * cos_stride + column[None, :]
    of_sin = sin + token[:, None] * sin_stride + column[None, :]
    dtype = x.dtype.element_ty
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    turned_a = a * tl.load(of_cos, mask=mask, other=0.0).to(tl.float32)
    turned_b = b * tl.load(of_cos + HALF, mask=mask, other=0.0).to(tl.float32)
    turned_a = rounded(turned_a, dtype, IS_INTERPRETED).to(tl.float32) + b * tl.load(of_sin, mask=mask, other=0.0).to(
        tl.float32
    )
    turned_b = rounded(turned_b, dtype, IS_INTERPRETED).to(tl.float32) + a * tl.load(
        of_sin + HALF, mask=mask, other=0.0
    ).to(tl.float32)
    tl.store(first, rounded(turned_a, dtype, IS_INTERPRETED), mask=mask)
    tl.store(first + HALF, rounded(turned_b, dtype, IS_INTERPRETED), mask=mask)


@triton.jit
def gate_rows(
    x,
    x_stride,
    out,  # [num_rows, SIZE]; where GROUPS, bytes of e4m3 numbers
    scales,  # [num_rows, SIZE / GROUP rounded up] float32, where GROUPS
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr,  # of WIDTH numbers that are rounded to e4m3; 0: they are not
    IS_INTERPRETED: tl.constexpr,
):
    """activation(first half of a row), rounded, times the second half; WIDTH numbers of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    mask = column < SIZE
    source = x + row * x_stride + column
    dtype = x.dtype.element_ty
    gate = activate(tl.load(source, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    gate = rounded(gate, dtype, IS_INTERPRETED).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    found = rounded(gate * up, dtype, IS_INTERPRETED)
    if GROUPS > 0:
        found, of_groups = rounded_tile(found.to(tl.float32), GROUPS)
        count: tl.constexpr = (SIZE + WIDTH // GROUPS - 1) // (WIDTH // GROUPS)
        group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
        tl.store(scales + row * count + group, of_groups, mask=group < count)
    tl.store(out + row * SIZE + column, found, mask=mask)


@triton.jit
def table_rows(
    table,
    table_stride,
    indices,
    out,
    scale,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The rows of a table at some indices, times a scale; WIDTH numbers of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < SIZE
    numbers = tl.load(table + tl.load(indices + row) * table_stride + column, mask=mask, other=0)
    if SCALES:
        numbers = rounded(numbers.to(tl.float32) * scale, out.dtype.element_ty, IS_INTERPRETED)
    tl.store(out + row * SIZE + column, numbers, mask=mask)
