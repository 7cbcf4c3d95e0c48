"""Rows of the KV cache inside kernels: the format of ``fwk_attention._common.rows``, written and read.

``FORMAT`` is PLAIN, INT8 or FP8. Only operations that every Triton device and the interpreter have: fp8 numbers are
made and read as bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
        largest = 127.0 if FORMAT == INT8 else 448.0
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), 1), largest), 1e-30)
        scaled = tl.div_rn(numbers, tl.broadcast_to(scale[:, None], (TOKENS, WIDTH)))
        scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -largest), largest), 0.0)
        code = encode_int8(scaled) if FORMAT == INT8 else encode_fp8(scaled)
        tl.store(target, code, mask=mask)
        # A maximum overlooks NaN, and an infinity divides to NaN: adding zero times all numbers lets neither be lost.
        scale += tl.sum(numbers * 0.0, 1)
        tl.store(scales + row // 4 + (ROW // 4 - 1), scale, mask=is_token)
