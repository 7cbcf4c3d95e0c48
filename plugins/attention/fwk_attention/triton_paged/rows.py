"""Rows of the KV cache inside kernels: the format of ``fwk_attention._common.rows``, written and read.

``FORMAT`` is PLAIN, INT8 or FP8. Only operations that every Triton device and the interpreter have: fp8 numbers are
made and read as bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fwk_tiles.numbers import rounded

PLAIN, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def encode_int8(y):
    """Numbers within +-127 to the nearest whole one (ties to even) as a byte."""
    magic = 12582912.0  # 1.5 * 2**23: its last bit is worth one
    nearest = (y + magic) - magic
    return (nearest.to(tl.int32) & 255).to(tl.uint8)


@triton.jit
def encode_fp8(y):
    """Numbers within +-448 to the nearest of e4m3 (ties to even) as a byte: sign, 4 bits of exponent, 3 of mantissa."""
    magnitude = tl.abs(y)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Normal: keep 3 of 23 bits of the mantissa, and count exponents from -7 instead of -127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 steps are 2**-9 wide, as wide as float32's at 2**14.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 128
    return (tl.where(magnitude < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def decode(x, FORMAT: tl.constexpr):
    """Stored bytes to numbers not yet scaled, in float32; half precision would hold them exactly."""
    if FORMAT == INT8:
        return x.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        # The same bits as float16, whose exponents are counted from -15 instead of -7; e4m3's subnormals fit as well.
        wide = x.to(tl.uint16)
        half = (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256.0


@triton.jit
def scale_of_rows(largest, FORMAT: tl.constexpr):
    """Of rows whose largest numbers are these."""
    return tl.maximum(tl.div_rn(largest, 127.0 if FORMAT == INT8 else 448.0), 1e-30)


@triton.jit
def encode(numbers, scale, FORMAT: tl.constexpr):
    """Numbers as bytes; scale: of the same shape. What is no number becomes 0."""
    largest = 127.0 if FORMAT == INT8 else 448.0
    scaled = tl.div_rn(numbers, scale)
    scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -largest), largest), 0.0)
    return encode_int8(scaled) if FORMAT == INT8 else encode_fp8(scaled)


@triton.jit(do_not_specialize=["num_tokens"])
def store_rows(
    k,
    k_token_stride,
    k_head_stride,
    v,
    v_token_stride,
    v_head_stride,
    cache,
    scales,
    slot_mapping,
    num_tokens,
    num_heads,
    value_offset,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write K or V of TOKENS tokens of one KV head (k, v: [num_tokens, num_kv_heads, SIZE]) into their slots.

    The second ``num_heads`` programs are V's; a latent layer, which has none, has only the first.
    """
    head = tl.program_id(1) % num_heads
    part = tl.program_id(1) // num_heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    is_token = token < num_tokens
    mask = is_token[:, None] & (column < SIZE)[None, :]
    keys = k + token.to(tl.int64)[:, None] * k_token_stride + head * k_head_stride + column[None, :]
    values = v + token.to(tl.int64)[:, None] * v_token_stride + head * v_head_stride + column[None, :]
    # Two loads, of which one does nothing: a choice between pointers would hide how they are aligned.
    key_numbers = tl.load(keys, mask=is_token[:, None] & (column < SIZE * (1 - part))[None, :], other=0.0)
    value_numbers = tl.load(values, mask=is_token[:, None] & (column < SIZE * part)[None, :], other=0.0)
    numbers = tl.where(part == 0, key_numbers, value_numbers)
    part_offset = part * value_offset
    slot = tl.load(slot_mapping + token, mask=is_token, other=0)
    row = (slot // BLOCK_SIZE) * BLOCK_STRIDE + part_offset + (head * BLOCK_SIZE + slot % BLOCK_SIZE) * ROW
    target = cache + row[:, None] + column[None, :]
    if FORMAT == PLAIN:
        tl.store(target, numbers.to(cache.dtype.element_ty), mask=mask)
    else:
        numbers = numbers.to(tl.float32)
        scale = scale_of_rows(tl.max(tl.abs(numbers), 1), FORMAT)
        code = encode(numbers, tl.broadcast_to(scale[:, None], (TOKENS, WIDTH)), FORMAT)
        tl.store(target, code, mask=mask)
        # A maximum overlooks NaN, and an infinity divides to NaN: adding zero times all numbers lets neither be lost.
        scale += tl.sum(numbers * 0.0, 1)
        tl.store(scales + row // 4 + (ROW // 4 - 1), scale, mask=is_token)


@triton.jit
def turned(x, other, of_cos, of_sin, mask, dtype: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """x * cos + other * sin, of which the first product is rounded, too."""
    by = rounded(x * tl.load(of_cos, mask=mask, other=0.0).to(tl.float32), dtype, IS_INTERPRETED)
    across = other * tl.load(of_sin, mask=mask, other=0.0).to(tl.float32)
    return rounded(by.to(tl.float32) + across, dtype, IS_INTERPRETED)


@triton.jit(do_not_specialize=["num_tokens"])
def turn_rows(
    qkv,
    token_stride,
    head_stride,
    weight,
    cos,
    cos_stride,
    sin,
    sin_stride,
    cache,
    scales,
    slot_mapping,
    num_tokens,
    num_heads,
    num_kv_heads,
    value_offset,
    eps,
    HALF: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    NORMS: tl.constexpr,
    ROUNDS_LAST: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,  # HALF as a power of two
    IS_INTERPRETED: tl.constexpr,
):
    """One head of TOKENS tokens: queries and keys are normalised and rotated, keys and values stored in their slots.

    qkv: [num_tokens, num_heads + 2 * num_kv_heads, 2 * HALF]; queries stay where they are. The rounding steps are those
    of operators one after the other. A row is two halves, so that a thread reads both numbers that it turns.
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    is_token, is_column = token < num_tokens, column < HALF
    mask = is_token[:, None] & is_column[None, :]
    place = token.to(tl.int64)[:, None]
    first = qkv + place * token_stride + head * head_stride + column[None, :]
    dtype = qkv.dtype.element_ty
    a, b = tl.load(first, mask=mask, other=0.0), tl.load(first + HALF, mask=mask, other=0.0)
    if head < num_heads + num_kv_heads:
        left, right = a.to(tl.float32), b.to(tl.float32)
        if NORMS:
            squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
            factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
            left, right = left * factor, right * factor
            if not ROUNDS_LAST:
                left = rounded(left, dtype, IS_INTERPRETED).to(tl.float32)
                right = rounded(right, dtype, IS_INTERPRETED).to(tl.float32)
            of = weight + head * 2 * HALF + column
            left *= tl.load(of, mask=is_column, other=0.0).to(tl.float32)[None, :]
            right *= tl.load(of + HALF, mask=is_column, other=0.0).to(tl.float32)[None, :]
            left = rounded(left, dtype, IS_INTERPRETED).to(tl.float32)
            right = rounded(right, dtype, IS_INTERPRETED).to(tl.float32)
        of_cos, of_sin = cos + place * cos_stride + column[None, :], sin + place * sin_stride + column[None, :]
        a = turned(left, right, of_cos, of_sin, mask, dtype, IS_INTERPRETED)
        b = turned(right, left, of_cos + HALF, of_sin + HALF, mask, dtype, IS_INTERPRETED)
    if head < num_heads:
        tl.store(first, a, mask=mask)
        tl.store(first + HALF, b, mask=mask)
    else:
        part, kv_head = (head - num_heads) // num_kv_heads, (head - num_heads) % num_kv_heads
        slot = tl.load(slot_mapping + token, mask=is_token, other=0)
        row = (slot // BLOCK_SIZE) * BLOCK_STRIDE + part * value_offset
        row += (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * ROW
        target = cache + row[:, None] + column[None, :]
        if FORMAT == PLAIN:
            tl.store(target, a.to(cache.dtype.element_ty), mask=mask)
            tl.store(target + HALF, b.to(cache.dtype.element_ty), mask=mask)
        else:
            left, right = a.to(tl.float32), b.to(tl.float32)
            scale = scale_of_rows(tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1)), FORMAT)
            wide = tl.broadcast_to(scale[:, None], (TOKENS, WIDTH))
            tl.store(target, encode(left, wide, FORMAT), mask=mask)
            tl.store(target + HALF, encode(right, wide, FORMAT), mask=mask)
            scale += tl.sum(left * 0.0, 1) + tl.sum(right * 0.0, 1)  # as in ``store_rows``
            tl.store(scales + row // 4 + (ROW // 4 - 1), scale, mask=is_token)
