"""Attention over the paged cache: one kernel for decoding, drafts and prompts, and one that joins split sequences.

A tile is some consecutive new tokens of one sequence and the range of its keys that any of them sees. A program
computes a tile for some query heads of one KV head, going once over the keys with a running softmax (FlashAttention,
Dao et al. 2022). Where a short tile has many keys, several programs take a part of them each (Flash-Decoding, Dao et
al. 2023) and leave a partial outcome with its maximum and its sum; ``join_parts`` puts these together. Tokens of
several sequences make up a tile where all of them see the same blocks (``shared.share``).
"""

# The compiler drops branches on constants, and with them what looks unbound:
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from fwk_attention.triton_paged import shared
from fwk_attention.triton_paged.rows import PLAIN, decode

TILE_FIELDS = tl.constexpr(8)
"""int32 per tile: sequence, its first new token in the batch, its number of new tokens, its tokens before them, the
tile's first new token, its first key, its last key (exclusive), where its partial outcome goes (-1: not partial)."""

JOIN_FIELDS = tl.constexpr(5)
"""int32 per tile to join: first new token in the batch, number of new tokens, the tile's first, first part, parts."""


SHARED_FIELDS, SLOT_FIELDS = tl.constexpr(shared.SHARED_FIELDS), tl.constexpr(shared.SLOT_FIELDS)


@triton.jit
def tile_rows(start, num_new, first, num_heads, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Which token and query head each row of a tile is: (index among new tokens, token, head, whether it is any)."""
    head_tiles = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // head_tiles
    row = tl.arange(0, ROWS)
    in_group = (tl.program_id(1) % head_tiles) * HEADS + row % HEADS
    index = first + row // HEADS
    is_row = (index < num_new) & (in_group < GROUP)
    return index, start + index, kv_head * GROUP + in_group, is_row


@triton.jit
def store_part(
    parts,
    part_stats,
    part,
    nth,
    result,
    top,
    total,
    is_row,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Leave rows' partial outcomes in rows ``nth`` of ``part``, of which each has ROWS."""
    place = part.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, WIDTH)
    kept = parts + (place * ROWS + nth)[:, None] * SIZE + column[None, :]
    tl.store(kept, result, mask=is_row[:, None] & (column < SIZE)[None, :])
    tl.store(part_stats + place * 2 * ROWS + nth, top, mask=is_row)
    tl.store(part_stats + (place * 2 + 1) * ROWS + nth, total, mask=is_row)


@triton.jit(do_not_specialize=["table_stride", "tree_stride"])
def attend_tiles(
    q,  # [num_tokens, num_heads, SIZE + REST]
    q_token_stride,
    q_head_stride,
    out,  # [num_tokens, num_heads, SIZE], contiguous
    cache,
    scales,  # the same memory as float32
    tiles,  # [num_tiles, TILE_FIELDS], or shared ones
    table,
    table_stride,
    positions,
    tree_mask,
    tree_stride,
    parts,  # [num_parts, programs per tile, PART_ROWS, SIZE] float32
    part_stats,  # [num_parts, programs per tile, 2, PART_ROWS] float32: maximum (base 2), sum
    num_heads,
    scale,
    soft_cap,
    GROUP: tl.constexpr,  # query heads per KV head
    HEADS: tl.constexpr,  # of them in one program
    SIZE: tl.constexpr,  # of the value, and of K, or in a latent layer of K's part that is the value
    REST: tl.constexpr,  # the rest of K in a latent layer
    WIDTH: tl.constexpr,  # SIZE and REST as powers of two
    REST_WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,  # from a row of K to that of V; 0 in a latent layer
    WINDOW: tl.constexpr,  # 0: none
    HAS_CAP: tl.constexpr,
    IS_TREE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    PART_ROWS: tl.constexpr,  # of the tiles that parts are of
    KEYS: tl.constexpr,
    SLOTS: tl.constexpr,  # tokens of a shared tile, ROWS // HEADS; 0: tiles of one sequence. Not in a tree, no window
    IS_INTERPRETED: tl.constexpr,
):
    head_tiles = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // head_tiles
    nth = tl.arange(0, ROWS)
    if SLOTS > 0:
        tile = tiles + tl.program_id(0) * (SHARED_FIELDS + SLOTS * SLOT_FIELDS)
        sequence, first_key, last_key = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        slot = tile + SHARED_FIELDS + nth // HEADS * SLOT_FIELDS
        in_group = (tl.program_id(1) % head_tiles) * HEADS + nth % HEADS
        token, head = tl.load(slot), kv_head * GROUP + in_group
        is_row = (token >= 0) & (in_group < GROUP)
        query_position = tl.load(positions + token, mask=is_row, other=0)  # lengths may have come late
    else:
        tile = tiles + tl.program_id(0) * TILE_FIELDS
        sequence, start, num_new, past = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
        first, first_key, last_key, part = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)
        index, token, head, is_row = tile_rows(start, num_new, first, num_heads, GROUP, HEADS, ROWS)
        query_position = (past + index).to(tl.int64)
        if IS_TREE:
            query_position = tl.load(positions + token, mask=is_row, other=0)
    column = tl.arange(0, WIDTH)
    is_column = column < SIZE
    query = q + token.to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride
    queries = tl.load(query + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
    if REST > 0:
        rest = SIZE + tl.arange(0, REST_WIDTH)
        is_rest = rest < SIZE + REST
        queries_rest = tl.load(query + rest[None, :], mask=is_row[:, None] & is_rest[None, :], other=0.0)
        if IS_INTERPRETED:
            queries_rest = queries_rest.to(tl.float32)
    if IS_INTERPRETED:
        queries = queries.to(tl.float32)  # the interpreter's dot would multiply the bits of bfloat16 numbers
    log2e = 1.4426950408889634
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, WIDTH), tl.float32)
    for at in range(first_key, last_key, KEYS):
        key = at + tl.arange(0, KEYS)
        is_key = key < last_key
        block = tl.load(table + sequence * table_stride + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        row = block * BLOCK_STRIDE + (kv_head * BLOCK_SIZE + key % BLOCK_SIZE) * ROW
        is_element = is_key[:, None] & is_column[None, :]
        keys = tl.load(cache + row[:, None] + column[None, :], mask=is_element, other=0)
        if FORMAT != PLAIN:
            keys = decode(keys, FORMAT)
        keys = keys.to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if REST > 0:
            is_element_rest = is_key[:, None] & is_rest[None, :]
            keys_rest = tl.load(cache + row[:, None] + rest[None, :], mask=is_element_rest, other=0)
            if FORMAT != PLAIN:
                keys_rest = decode(keys_rest, FORMAT)
            scores += tl.dot(queries_rest, tl.trans(keys_rest.to(queries.dtype)), input_precision="ieee")
        scores *= scale
        if FORMAT != PLAIN:
            key_scale = tl.load(scales + row // 4 + (ROW // 4 - 1), mask=is_key, other=0.0)
            scores *= key_scale[None, :]
        if HAS_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 / soft_cap * scores) - 1.0)  # soft_cap * tanh(scores / soft_cap)
        if IS_TREE:
            new = key - past
            is_new = is_key & (new >= 0) & (new < num_new)
            in_tree = tree_mask + token.to(tl.int64)[:, None] * tree_stride + new[None, :]
            branch = tl.load(in_tree, mask=is_row[:, None] & is_new[None, :], other=0)
            is_seen = is_key[None, :] & ((new < 0)[None, :] | (branch != 0))
            depth = tl.load(positions + start + new, mask=is_new, other=0)
            key_position = tl.where(is_new, depth, key.to(tl.int64))
        else:
            key_position = key.to(tl.int64)
            is_seen = is_key[None, :] & (key_position[None, :] <= query_position[:, None])
        if WINDOW > 0:
            is_seen &= key_position[None, :] > query_position[:, None] - WINDOW
        scores = tl.where(is_seen, scores * log2e, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may have seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        top = new_top
        total = total * fade + tl.sum(weights, 1)
        if VALUE_OFFSET > 0:
            values = tl.load(cache + row[:, None] + VALUE_OFFSET + column[None, :], mask=is_element, other=0)
            if FORMAT != PLAIN:
                values = decode(values, FORMAT)
            values = values.to(queries.dtype)
        else:
            values = keys
        if FORMAT != PLAIN:
            if VALUE_OFFSET > 0:
                value_scale = tl.load(scales + (row + VALUE_OFFSET) // 4 + (ROW // 4 - 1), mask=is_key, other=0.0)
            else:
                value_scale = key_scale
            weights *= value_scale[None, :]
        result = result * fade[:, None] + tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
    if SLOTS > 0:
        part, nth = tl.load(slot + 1), tl.load(slot + 2) * HEADS + nth % HEADS  # its own tile's row
        store_part(parts, part_stats, part, nth, result, top, total, is_row, SIZE, WIDTH, PART_ROWS)
    elif part < 0:
        target = out + (token.to(tl.int64) * num_heads + head)[:, None] * SIZE + column[None, :]
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
    else:
        store_part(parts, part_stats, part, nth, result, top, total, is_row, SIZE, WIDTH, PART_ROWS)


@triton.jit
def join_parts(
    out,
    joins,  # [num_joins, JOIN_FIELDS]
    parts,
    part_stats,
    num_heads,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    join = joins + tl.program_id(0) * JOIN_FIELDS
    start, num_new, first = tl.load(join), tl.load(join + 1), tl.load(join + 2)
    first_part, num_parts = tl.load(join + 3), tl.load(join + 4)
    _, token, head, is_row = tile_rows(start, num_new, first, num_heads, GROUP, HEADS, ROWS)
    column = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    mask = is_row[:, None] & (column < SIZE)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, WIDTH), tl.float32)
    for nth in range(num_parts):
        place = (first_part.to(tl.int64) + nth) * tl.num_programs(1) + tl.program_id(1)
        part_top = tl.load(part_stats + place * 2 * ROWS + row, mask=is_row, other=float("-inf"))
        part_total = tl.load(part_stats + (place * 2 + 1) * ROWS + row, mask=is_row, other=0.0)
        numbers = tl.load(parts + (place * ROWS + row)[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, part_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade, weight = tl.exp2(top - base), tl.exp2(part_top - base)
        top = new_top
        total = total * fade + part_total * weight
        result = result * fade[:, None] + numbers * weight[:, None]
    target = out + (token.to(tl.int64) * num_heads + head)[:, None] * SIZE + column[None, :]
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
