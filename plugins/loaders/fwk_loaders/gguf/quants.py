"""From ggml's blocks to numbers.

A quantised row is a run of blocks. ``d`` and ``m`` are float16 factors of a block; ``q`` are small integers, two to a
byte: the low four bits of a run of bytes hold its first half of values, the high four bits the second half.

========  ======================================================  ===========================================
type      bytes of a block, in order                              value
========  ======================================================  ===========================================
Q4_0      d, 16 of q                                              (q - 8) * d
Q4_1      d, m, 16 of q                                           q * d + m
Q5_0      d, 4 with the fifth bits, 16 of q                       (q - 16) * d
Q5_1      d, m, 4 with the fifth bits, 16 of q                    q * d + m
Q8_0      d, 32 signed q                                          q * d
Q4_K      d, m, 12 of scales, 128 of q                            q * (d * scale) - m * min
Q5_K      d, m, 12 of scales, 32 with the fifth bits, 128 of q    as Q4_K
Q2_K      16 with a scale and a min each, 64 of q, d, m           q * (d * scale) - m * min
Q3_K      32 with the third bits, 64 of q, 12 of scales, d        (q - 4) * (d * (scale - 32))
Q6_K      128 low bits, 64 high bits, 16 signed scales, d         (q - 32) * (d * scale)
IQ4_NL    d, 16 of q                                              d * LEVELS[q]
IQ4_XS    d, 2 with high bits of scales, 4 with low, 128 of q     LEVELS[q] * (d * (scale - 32))
MXFP4     e, 16 of q                                              2^(e - 128) * TWICE_E2M1[q]
========  ======================================================  ===========================================

The fifth bits of Q5_0 and Q5_1 are bit i of a u32 for value i. A K block has 256 values: eight sub-blocks of 32 with a
six-bit scale and a six-bit minimum each (Q4_K, Q5_K), or sixteen of 16 with a signed byte each (Q6_K), six bits (Q3_K),
or four for each of scale and minimum (Q2_K). Four two-bit integers share a byte, of runs of 32 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fwk_loaders.gguf.types import TensorType

CHUNK_VALUES = 2**19
"""Values converted at a time: the intermediate tensors stay in the cache, and memory stays small."""


DTYPES = (torch.float32, torch.bfloat16)
"""What blocks become: values are computed in float32, and rounded to the nearest."""


class DamagedBlock(ValueError):
    """A factor of a block is infinite or not a number."""

    def __init__(self) -> None:
        super().__init__("the scale of a block is infinite or not a number")


def dequantise(blocks: Tensor, stored: TensorType, values: Tensor) -> None:
    """blocks: [num_blocks, block_bytes] uint8 to ``values``, [num_blocks * block_size] of one of ``DTYPES``.

    Raises ``DamagedBlock``.
    """
    convert = _CONVERTERS[stored.name]
    out = values.view(blocks.shape[0], stored.block_size)
    chunk = CHUNK_VALUES // stored.block_size
    for start in range(0, blocks.shape[0], chunk):
        part = blocks[start : start + chunk]
        out[start : start + chunk] = convert(part).view(part.shape[0], stored.block_size)


def _factor(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block: [num_blocks, 1, 1] float32."""
    factor = blocks[:, start : start + 2].view(torch.float16).float()
    if not torch.isfinite(factor).all():
        raise DamagedBlock
    return factor.unsqueeze(-1)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """packed: [num_blocks, n] uint8 to [num_blocks, n / run * 2, run]: each run's low halves, then its high ones."""
    packed = packed.unflatten(1, (-1, 1, run))
    out = packed.new_empty(packed.shape[0], packed.shape[1], 2, run)
    torch.bitwise_and(packed[:, :, 0], 15, out=out[:, :, 0])
    torch.bitwise_right_shift(packed[:, :, 0], 4, out=out[:, :, 1])
    return out.flatten(1, 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """packed: [num_blocks, 4] uint8 to [num_blocks, 2, 16] uint8 of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return (bits << 4).view(-1, 2, 16)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:], 16).float().sub_(8.0).mul_(_factor(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:], 16).float().mul_(_factor(blocks, 0)).add_(_factor(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 6:], 16).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return q.float().sub_(16.0).mul_(_factor(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 8:], 16).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return q.float().mul_(_factor(blocks, 0)).add_(_factor(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_factor(blocks, 0).squeeze(-1))


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """packed: [num_blocks, 12] uint8 to two of [num_blocks, 8, 1] float32.

    The low six bits of bytes 0-3 and 4-7 are the first four scales and minima. The last four have their low four bits
    in bytes 8-11 (scales in the low half, minima in the high half) and their top two in the top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    mins = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float().unsqueeze(-1), mins.float().unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    q = _nibbles(blocks[:, 16:], 32).float()
    return q.mul_(scales.mul_(_factor(blocks, 0))).sub_(mins.mul_(_factor(blocks, 2)))


def _q5_k(blocks: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    q = _nibbles(blocks[:, 48:], 32).bitwise_or_(fifth).float()
    return q.mul_(scales.mul_(_factor(blocks, 0))).sub_(mins.mul_(_factor(blocks, 2)))


def _q6_k(blocks: Tensor) -> Tensor:
    num_blocks = blocks.shape[0]
    low = _nibbles(blocks[:, :128], 64).view(num_blocks, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3
    q = low.bitwise_or_(high << 4).float().sub_(32.0)
    scales = blocks[:, 192:208].view(torch.int8).float().unsqueeze(-1).mul_(_factor(blocks, 208))
    return q.view(num_blocks, 16, 16).mul_(scales)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Of IQ4_NL and IQ4_XS (ggml's ``kvalues_iq4nl``)."""

TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of four bits of OCP Microscaling Formats 1.0, table 5."""


def _pairs(packed: Tensor) -> Tensor:
    """packed: [num_blocks, 64] uint8 to [num_blocks, 8, 32] of two bits each."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return ((packed.unflatten(1, (2, 1, 32)) >> shifts) & 3).flatten(1, 2)


def _q2_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, :16].unsqueeze(-1)
    scales, mins = (packed & 15).float().mul_(_factor(blocks, 80)), (packed >> 4).float().mul_(_factor(blocks, 82))
    return _pairs(blocks[:, 16:80]).reshape(-1, 16, 16).float().mul_(scales).sub_(mins)


def _q3_k(blocks: Tensor) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 4, 1)
    high = (blocks[:, 104:108].unsqueeze(1) >> shifts & 3).flatten(1) << 4
    low = torch.cat((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), dim=1)
    scales = (low | high).float().sub_(32.0).unsqueeze(-1).mul_(_factor(blocks, 108))
    bits = blocks[:, :32].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1) & 1
    q = _pairs(blocks[:, 32:96]) | bits << 2
    return q.reshape(-1, 16, 16).float().sub_(4.0).mul_(scales)


def _levels(packed: Tensor, levels: tuple[int, ...]) -> Tensor:
    """packed: [num_blocks, n] uint8 to [num_blocks, n / 16, 32] of ``levels``."""
    return torch.tensor(levels, dtype=torch.float32)[_nibbles(packed, 16).long()].view(len(packed), -1, 32)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _levels(blocks[:, 2:], LEVELS).mul_(_factor(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = (blocks[:, 2:4].unsqueeze(-1) >> shifts & 3).flatten(1) << 4
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    scales = (low | high).float().sub_(32.0).unsqueeze(-1).mul_(_factor(blocks, 0))
    return _levels(blocks[:, 8:], LEVELS).mul_(scales)


def _mxfp4(blocks: Tensor) -> Tensor:
    e = blocks[:, :1].int()
    if (e == 255).any():  # not a number (section 5.4.1)
        raise DamagedBlock
    scales = torch.where(e < 2, 0x200000 << e, (e - 1) << 23).view(torch.float32)
    return _levels(blocks[:, 1:], TWICE_E2M1).mul_(scales.unsqueeze(-1))


_CONVERTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
