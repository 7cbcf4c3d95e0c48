"""Pairs of token and expert, sorted by expert, and products of tiles of them with the experts' matrices.

A tile is up to ROWS pairs of one expert. How many tiles there may be is known from the number of pairs alone, so that
neither a grid nor a buffer depends on what the router chose, and the host need not ask.
"""

# A type checker takes scans and sums for tuples:
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

SILU, GELU, GELU_TANH, RELU, RELU2 = (tl.constexpr(i) for i in range(5))

TILE_FIELDS = tl.constexpr(4)
"""int32 per tile: expert, its first pair in sorted order, number of pairs (0: a tile that is not used), unused."""


@triton.jit
def rounded(x, dtype: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """float32 numbers to the nearest of dtype, ties to even: the interpreter cuts bits off for bfloat16."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


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
def sigmoid(x):
    """1 / (1 + exp(-x)), which overflows for no x."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of float32 numbers."""
    if ACTIVATION == SILU:
        return x * sigmoid(x)
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        y = tl.minimum(tl.maximum(x, -20.0), 20.0)  # beyond, nothing changes; the cube would overflow
        return x * sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # (1 + tanh(z)) / 2 = sigmoid(2 z)
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive if ACTIVATION == RELU2 else positive


@triton.jit
def gate_up_tiles(
    x,
    x_stride,
    weights,  # [num_experts, 2 * INNER, SIZE]
    tiles,
    pairs,
    out,  # [num_pairs, INNER], in sorted order
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
        gates = weights + expert.to(tl.int64) * (2 * INNER * SIZE) + column[:, None].to(tl.int64) * SIZE
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, SIZE, STEP):
            k = at + tl.arange(0, STEP)
            is_k = k < SIZE
            given = tl.load(x + token[:, None] * x_stride + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            mask = is_column[:, None] & is_k[None, :]
            of_gate = tl.load(gates + k[None, :], mask=mask, other=0.0)
            of_up = tl.load(gates + INNER * SIZE + k[None, :], mask=mask, other=0.0)
            if IS_INTERPRETED:  # its dot would multiply the bits of bfloat16 numbers
                given, of_gate, of_up = given.to(tl.float32), of_gate.to(tl.float32), of_up.to(tl.float32)
            gate = tl.dot(given, tl.trans(of_gate), gate, input_precision="ieee")
            up = tl.dot(given, tl.trans(of_up), up, input_precision="ieee")
        target = out + (first + row).to(tl.int64)[:, None] * INNER + column[None, :]
        numbers = rounded(activate(gate, ACTIVATION) * up, out.dtype.element_ty, IS_INTERPRETED)
        tl.store(target, numbers, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def down_tiles(
    x,  # [num_pairs, INNER], in sorted order
    weights,  # [num_experts, SIZE, INNER]
    tiles,
    pairs,
    out,  # [num_pairs, SIZE], in the order of the router
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
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
        matrix = weights + expert.to(tl.int64) * (SIZE * INNER) + column[:, None].to(tl.int64) * INNER
        source = x + (first + row).to(tl.int64)[:, None] * INNER
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, INNER, STEP):
            k = at + tl.arange(0, STEP)
            is_k = k < INNER
            given = tl.load(source + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            factors = tl.load(matrix + k[None, :], mask=is_column[:, None] & is_k[None, :], other=0.0)
            if IS_INTERPRETED:
                given, factors = given.to(tl.float32), factors.to(tl.float32)
            total = tl.dot(given, tl.trans(factors), total, input_precision="ieee")
        target = out + pair[:, None] * SIZE + column[None, :]
        numbers = rounded(total, out.dtype.element_ty, IS_INTERPRETED)
        tl.store(target, numbers, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_experts(
    x,  # [num_tokens * TOP_K, SIZE]
    factors,  # [num_tokens * TOP_K] float32
    out,  # [num_tokens, SIZE]
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
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
        total += tl.load(x + pair * SIZE + column, mask=mask, other=0.0).to(tl.float32) * tl.load(factors + pair)
    tl.store(out + token * SIZE + column, rounded(total, out.dtype.element_ty, IS_INTERPRETED), mask=mask)
