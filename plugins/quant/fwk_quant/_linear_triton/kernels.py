"""Products of few tokens with a packed matrix, in parts of its inputs where it has too few outputs to fill a device."""

# A type checker takes scans and sums for tuples:
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from fwk_tiles.matrices import matrix_tile, rounded_products
from fwk_tiles.numbers import rounded


@triton.jit(do_not_specialize=["num_tokens"])
def packed_products(
    x,  # [num_tokens, INPUTS]
    x_stride,
    x_scales,  # [num_tokens, GROUPS] float32, where ROUNDS: then x is bytes of e4m3 numbers
    numbers,  # [OUTPUTS, INPUTS], as FORMAT packs them
    scales,  # [OUTPUTS / ROW_BLOCK, GROUPS]
    zeros,  # [OUTPUTS, GROUPS]
    bias,  # [OUTPUTS]
    out,  # [num_tokens, OUTPUTS]; with PARTS > 1 float32, [PARTS, num_tokens, OUTPUTS]
    num_tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROUNDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,  # inputs of a part: a multiple of STEP
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """COLUMNS outputs of ROWS tokens, by SPAN of the inputs: rounded once, or a part of a sum."""
    part = tl.program_id(1)
    token = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_token = token < num_tokens
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < OUTPUTS
    row = tl.where(is_column, column, 0).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(part * SPAN, tl.minimum(part * SPAN + SPAN, INPUTS), STEP):
        k = at + tl.arange(0, STEP)
        mask = is_token[:, None] & (k < INPUTS)[None, :]
        given = tl.load(x + token[:, None] * x_stride + k[None, :], mask=mask, other=0)
        if ROUNDS:
            total += rounded_products(
                given, x_scales + token * GROUPS, is_token, numbers, scales, row, is_column, at,
                INPUTS, STEP, GROUPS, GROUP, ROW_BLOCK,
            )  # fmt: skip
        else:
            factors = matrix_tile(
                numbers, scales, zeros, row, is_column, at, INPUTS, STEP,
                FORMAT, GROUPS, GROUP, ROW_BLOCK, HAS_ZEROS, x.dtype.element_ty, IS_INTERPRETED,
            )  # fmt: skip
            if IS_INTERPRETED:  # its dot would multiply the bits of bfloat16 numbers
                given, factors = given.to(tl.float32), factors.to(tl.float32)
            total = tl.dot(given, tl.trans(factors), total, input_precision="ieee")
    if GROUPS == 1 and not HAS_ZEROS:
        total *= tl.load(scales + row // ROW_BLOCK).to(tl.float32)[None, :]
    if ROUNDS and GROUPS == 1:
        total *= tl.load(x_scales + token, mask=is_token, other=0.0)[:, None]
    mask = is_token[:, None] & is_column[None, :]
    if PARTS > 1:
        place = (part * num_tokens + token[:, None]) * OUTPUTS + column[None, :]
        tl.store(out + place, total, mask=mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias + row).to(tl.float32)[None, :]
        found = rounded(total, out.dtype.element_ty, IS_INTERPRETED)
        tl.store(out + token[:, None] * OUTPUTS + column[None, :], found, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def add_parts(
    parts,  # [PARTS, num_tokens, OUTPUTS] float32
    bias,  # [OUTPUTS]
    out,  # [num_tokens, OUTPUTS]
    num_tokens,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The sums of the parts, in their order; WIDTH outputs of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < OUTPUTS
    total = tl.zeros((WIDTH,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + (part * num_tokens + token) * OUTPUTS + column, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * OUTPUTS + column, rounded(total, out.dtype.element_ty, IS_INTERPRETED), mask=mask)


@triton.jit
def unpack_tiles(
    numbers,  # [OUTPUTS, INPUTS], as FORMAT packs them
    scales,
    zeros,
    out,  # [OUTPUTS, INPUTS]
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """STEP numbers of ROWS rows of the matrix; not scaled where a row has one scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < OUTPUTS
    at = tl.program_id(1) * STEP
    safe = tl.where(is_row, row, 0)
    found = matrix_tile(
        numbers, scales, zeros, safe, is_row, at, INPUTS, STEP,
        FORMAT, GROUPS, GROUP, ROW_BLOCK, HAS_ZEROS, out.dtype.element_ty, IS_INTERPRETED,
    )  # fmt: skip
    column = at + tl.arange(0, STEP)
    mask = is_row[:, None] & (column < INPUTS)[None, :]
    tl.store(out + row[:, None] * INPUTS + column[None, :], found, mask=mask)
