"""Products of a step's tokens with the matrices of their own adapters (Chen et al. 2023, Punica).

A tile is up to ROWS tokens of one adapter; the host cuts a step into tiles once for all layers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fwk_tiles.numbers import rounded

TILE_FIELDS = tl.constexpr(3)
"""int32 per tile: the adapter's slot, its first token in sorted order, number of tokens."""

BLOCK_FIELDS = tl.constexpr(3)
"""int32 per block of outputs: the part they are of, the first, and the end of the part."""


@triton.jit
def shrink_tiles(
    x,
    x_stride,
    a,  # [num_slots, RANKS, INPUTS]
    tiles,
    tokens,  # [num_tokens with an adapter] int32: sorted by adapter
    out,  # [num_tokens with an adapter, RANKS], in sorted order
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """x @ a.T of one tile, COLUMNS ranks of it."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    slot, first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    row = tl.arange(0, ROWS)
    is_row = row < count
    token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < RANKS
    factors = a + (slot * RANKS + column)[:, None] * INPUTS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, INPUTS, STEP):
        k = at + tl.arange(0, STEP)
        is_k = (k < INPUTS)[None, :]
        given = tl.load(x + token[:, None] * x_stride + k[None, :], mask=is_row[:, None] & is_k, other=0.0)
        matrix = tl.load(factors + k[None, :], mask=is_column[:, None] & is_k, other=0.0)
        if IS_INTERPRETED:  # its dot would multiply the bits of bfloat16 numbers
            given, matrix = given.to(tl.float32), matrix.to(tl.float32)
        total = tl.dot(given, tl.trans(matrix), total, input_precision="ieee")
    target = out + (first + row).to(tl.int64)[:, None] * RANKS + column[None, :]
    tl.store(target, rounded(total, out.dtype.element_ty, IS_INTERPRETED), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def expand_tiles(
    x,  # [num_tokens with an adapter, RANKS], of ``shrink_tiles``
    b,  # [num_slots, OUTPUTS, RANK]
    tiles,
    tokens,
    blocks,  # [num_blocks, BLOCK_FIELDS]
    y,
    y_stride,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,  # of all parts
    RANK: tl.constexpr,  # of one
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """y += x @ b.T of one tile and COLUMNS outputs of one part."""
    tile, block = tiles + tl.program_id(0) * TILE_FIELDS, blocks + tl.program_id(1) * BLOCK_FIELDS
    slot, first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    part, start, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    row, rank = tl.arange(0, ROWS), tl.arange(0, RANK)
    is_row = row < count
    token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
    column = start + tl.arange(0, COLUMNS)
    is_column = column < end
    source = x + (first + row).to(tl.int64)[:, None] * RANKS + (part * RANK + rank)[None, :]
    given = tl.load(source, mask=is_row[:, None], other=0.0)
    matrix = tl.load(b + (slot * OUTPUTS + column)[:, None] * RANK + rank[None, :], mask=is_column[:, None], other=0.0)
    if IS_INTERPRETED:
        given, matrix = given.to(tl.float32), matrix.to(tl.float32)
    target = y + token[:, None] * y_stride + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    total = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    total += tl.dot(given, tl.trans(matrix), input_precision="ieee")
    tl.store(target, rounded(total, y.dtype.element_ty, IS_INTERPRETED), mask=mask)
