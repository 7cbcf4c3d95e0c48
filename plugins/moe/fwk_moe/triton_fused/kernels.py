"""Pairs of token and expert, sorted by expert, and products of tiles of them with the experts' matrices.

A tile is up to ROWS pairs of one expert. How many tiles there may be is known from the number of pairs alone, so that
neither a grid nor a buffer depends on what the router chose, and the host need not ask.
"""

# A type checker takes scans and sums for tuples:
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from fwk_tiles.matrices import INT4, PLAIN, matrix_tile, rounded_products
from fwk_tiles.numbers import activate, rounded

TILE_FIELDS = tl.constexpr(4)
"""int32 per tile: expert, its first pair in sorted order, number of pairs (0: a tile that is not used), unused."""


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(expert_ids, counts, num_pairs, WIDTH: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """How many pairs one expert has; a program an expert."""
    expert = tl.program_id(0)
    count = tl.zeros((WIDTH,), tl.int32)
    for at in range(0, num_pairs, WIDTH):
        pair = at + tl.arange(0, WIDTH)
        count += (tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def sort_pairs(
    expert_ids,  # [num_pairs]
    counts,  # [EXPERTS]
    pairs,  # [num_pairs] int32: sorted by expert, those of one expert in ascending order
    tiles,  # [max_tiles, TILE_FIELDS]
    num_pairs,
    max_tiles,
    EXPERTS: tl.constexpr,
    EXPERTS_WIDTH: tl.constexpr,  # EXPERTS as a power of two
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Write one expert's pairs and tiles; a program an expert."""
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS_WIDTH)
    of_each = tl.load(counts + index, mask=index < EXPERTS, other=0)
    tiles_of_each = (of_each + ROWS - 1) // ROWS
    first = tl.sum(tl.where(index < expert, of_each, 0), 0)
    first_tile = tl.sum(tl.where(index < expert, tiles_of_each, 0), 0)
    count = tl.sum(tl.where(index == expert, of_each, 0), 0)
    place = first
    for at in range(0, num_pairs, WIDTH):
        pair = at + tl.arange(0, WIDTH)
        is_mine = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1) == expert
        nth = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(pairs + place + nth - 1, pair, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), 0)
    for nth_tile in range(0, (count + ROWS - 1) // ROWS):
        tile = tiles + (first_tile + nth_tile) * TILE_FIELDS
        tl.store(tile, expert)
        tl.store(tile + 1, first + nth_tile * ROWS)
        tl.store(tile + 2, tl.minimum(count - nth_tile * ROWS, ROWS))
    if expert == 0:
        for unused in range(tl.sum(tiles_of_each, 0), max_tiles):
            tl.store(tiles + unused * TILE_FIELDS + 2, 0)


@triton.jit
def gate_up_tiles(
    x,
    x_stride,
    x_scales,  # [num_tokens, GROUPS] float32, where ROUNDS: then x is bytes of e4m3 numbers
    weights,  # [num_experts, 2 * INNER, SIZE], or as FORMAT packs them
    scales,  # [num_experts, 2 * INNER / ROW_BLOCK, GROUPS]
    zeros,  # [num_experts, 2 * INNER, GROUPS]
    tiles,
    pairs,
    out,  # [num_pairs, INNER], in sorted order
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """activation(gate) * up of one tile's tokens, COLUMNS outputs of each; rounded once."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    expert, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        row = tl.arange(0, ROWS)
        is_row = row < count
        token = (tl.load(pairs + first + row, mask=is_row, other=0) // TOP_K).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < INNER
        numbers = weights + expert.to(tl.int64) * (2 * INNER * (SIZE // 2 if FORMAT == INT4 else SIZE))
        own_scales = scales + expert.to(tl.int64) * ((2 * INNER + ROW_BLOCK - 1) // ROW_BLOCK * GROUPS)
        own_zeros = zeros + expert.to(tl.int64) * (2 * INNER * GROUPS)
        safe = tl.where(is_column, column, 0).to(tl.int64)
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, SIZE, STEP):
            k = at + tl.arange(0, STEP)
            is_k = k < SIZE
            given = tl.load(x + token[:, None] * x_stride + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0)
            if ROUNDS:
                gate += rounded_products(
                    given, x_scales + token * GROUPS, is_row, numbers, own_scales, safe, is_column, at,
                    SIZE, STEP, GROUPS, GROUP, ROW_BLOCK,
                )  # fmt: skip
                up += rounded_products(
                    given, x_scales + token * GROUPS, is_row, numbers, own_scales, INNER + safe, is_column, at,
                    SIZE, STEP, GROUPS, GROUP, ROW_BLOCK,
                )  # fmt: skip
            else:
                of_gate = matrix_tile(
                    numbers, own_scales, own_zeros, safe, is_column, at, SIZE, STEP,
                    FORMAT, GROUPS, GROUP, ROW_BLOCK, HAS_ZEROS, x.dtype.element_ty, IS_INTERPRETED,
                )  # fmt: skip
                of_up = matrix_tile(
                    numbers, own_scales, own_zeros, INNER + safe, is_column, at, SIZE, STEP,
                    FORMAT, GROUPS, GROUP, ROW_BLOCK, HAS_ZEROS, x.dtype.element_ty, IS_INTERPRETED,
                )  # fmt: skip
                if IS_INTERPRETED:  # its dot would multiply the bits of bfloat16 numbers
                    given, of_gate, of_up = given.to(tl.float32), of_gate.to(tl.float32), of_up.to(tl.float32)
                gate = tl.dot(given, tl.trans(of_gate), gate, input_precision="ieee")
                up = tl.dot(given, tl.trans(of_up), up, input_precision="ieee")
        if FORMAT != PLAIN and GROUPS == 1 and not HAS_ZEROS:
            gate *= tl.load(own_scales + safe // ROW_BLOCK).to(tl.float32)[None, :]
            up *= tl.load(own_scales + (INNER + safe) // ROW_BLOCK).to(tl.float32)[None, :]
        if ROUNDS and GROUPS == 1:
            of_tokens = tl.load(x_scales + token, mask=is_row, other=0.0)[:, None]
            gate, up = gate * of_tokens, up * of_tokens
        target = out + (first + row).to(tl.int64)[:, None] * INNER + column[None, :]
        gated = rounded(activate(gate, ACTIVATION) * up, out.dtype.element_ty, IS_INTERPRETED)
        tl.store(target, gated, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def down_tiles(
    x,  # [num_pairs, INNER], in sorted order
    x_scales,  # [num_pairs, GROUPS] float32, where ROUNDS: then x is bytes of e4m3 numbers
    weights,  # [num_experts, SIZE, INNER], or as FORMAT packs them
    scales,  # [num_experts, SIZE / ROW_BLOCK, GROUPS]
    zeros,  # [num_experts, SIZE, GROUPS]
    tiles,
    pairs,
    out,  # [num_pairs, SIZE], in the order of the router
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The expert's output for each pair of one tile, COLUMNS of its numbers."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    expert, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        row = tl.arange(0, ROWS)
        is_row = row < count
        pair = tl.load(pairs + first + row, mask=is_row, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < SIZE
        numbers = weights + expert.to(tl.int64) * (SIZE * (INNER // 2 if FORMAT == INT4 else INNER))
        own_scales = scales + expert.to(tl.int64) * ((SIZE + ROW_BLOCK - 1) // ROW_BLOCK * GROUPS)
        own_zeros = zeros + expert.to(tl.int64) * (SIZE * GROUPS)
        safe = tl.where(is_column, column, 0).to(tl.int64)
        source = x + (first + row).to(tl.int64)[:, None] * INNER
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, INNER, STEP):
            k = at + tl.arange(0, STEP)
            is_k = k < INNER
            given = tl.load(source + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0)
            if ROUNDS:
                total += rounded_products(
                    given, x_scales + (first + row) * GROUPS, is_row, numbers, own_scales, safe, is_column, at,
                    INNER, STEP, GROUPS, GROUP, ROW_BLOCK,
                )  # fmt: skip
            else:
                factors = matrix_tile(
                    numbers, own_scales, own_zeros, safe, is_column, at, INNER, STEP,
                    FORMAT, GROUPS, GROUP, ROW_BLOCK, HAS_ZEROS, x.dtype.element_ty, IS_INTERPRETED,
                )  # fmt: skip
                if IS_INTERPRETED:
                    given, factors = given.to(tl.float32), factors.to(tl.float32)
                total = tl.dot(given, tl.trans(factors), total, input_precision="ieee")
        if FORMAT != PLAIN and GROUPS == 1 and not HAS_ZEROS:
            total *= tl.load(own_scales + safe // ROW_BLOCK).to(tl.float32)[None, :]
        if ROUNDS and GROUPS == 1:
            total *= tl.load(x_scales + first + row, mask=is_row, other=0.0)[:, None]
        target = out + pair[:, None] * SIZE + column[None, :]
        outputs = rounded(total, out.dtype.element_ty, IS_INTERPRETED)
        tl.store(target, outputs, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_experts(
    x,  # [num_tokens * TOP_K, SIZE]
    factors,  # [num_tokens * TOP_K] float32
    expert_ids,  # the same, where HAS_OTHERS: what is in x for others than 0 to EXPERTS - 1 was not computed
    out,  # [num_tokens, SIZE]
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """The weighted sum of a token's experts, in the order in which the router named them; WIDTH numbers a program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < SIZE
    total = tl.zeros((WIDTH,), tl.float32)
    for nth in range(TOP_K):
        pair = token * TOP_K + nth
        is_added = mask
        if HAS_OTHERS:
            expert = tl.load(expert_ids + pair)
            is_added = tl.where((expert >= 0) & (expert < EXPERTS), mask, False)
        total += tl.load(x + pair * SIZE + column, mask=is_added, other=0.0).to(tl.float32) * tl.load(factors + pair)
    tl.store(out + token * SIZE + column, rounded(total, out.dtype.element_ty, IS_INTERPRETED), mask=mask)
