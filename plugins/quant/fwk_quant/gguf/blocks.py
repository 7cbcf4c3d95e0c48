"""From the blocks of GGUF files to numbers, exactly as ggml computes them in float32.

``d`` and ``m`` are float16 factors of a block; ``q`` are small integers. Two four-bit integers share a byte: of a run
of bytes, the low halves come first, then the high halves.

=====  ======  =====  ==============================================  ==================================
type   values  bytes  in order                                        value
=====  ======  =====  ==============================================  ==================================
Q8_0   32      34     d, 32 signed q                                  q * d
Q4_0   32      18     d, 16 with q                                    (q - 8) * d
Q4_1   32      20     d, m, 16 with q                                 q * d + m
Q5_0   32      22     d, 4 with fifth bits, 16 with q                 (q - 16) * d
Q5_1   32      24     d, m, 4 with fifth bits, 16 with q              q * d + m
Q4_K   256     144    d, m, 12 with scales, 128 with q in runs of 32  q * (d * scale) - m * minimum
Q5_K   256     176    d, m, 12 with scales, 32 with fifth bits, 128   as Q4_K
                      with q in runs of 32
Q2_K   256     84     16 with a scale and a minimum in four bits      q * (d * scale) - m * minimum
                      each, 64 with q of two bits, d, m
Q3_K   256     110    32 with third bits, 64 with two low bits of q,  (q - 4) * (d * (scale - 32))
                      12 with scales, d
Q6_K   256     210    128 with low bits in runs of 64, 64 with two    (q - 32) * (d * scale)
                      high bits, 16 signed scales, d
IQ4_NL 32      18     d, 16 with q                                    d * LEVELS[q]
IQ4_XS 256     136    d, 2 with two high bits of scales, 4 with four  LEVELS[q] * (d * (scale - 32))
                      low ones, 128 with q in runs of 16
MXFP4  32      17     e, 16 with q                                    2^(e - 128) * TWICE_E2M1[q]
=====  ======  =====  ==============================================  ==================================

A Q4_K or Q5_K block has eight sub-blocks of 32, with a six-bit scale and minimum each; a Q6_K block sixteen of 16.
Number i of a Q5_0 or Q5_1 block has its fifth bit in bit i of the four bytes; number i of sub-block n of a Q5_K block
in bit n of byte i.

``LEVELS`` are ggml's ``kvalues_iq4nl``, ``TWICE_E2M1`` twice the four-bit numbers of OCP Microscaling Formats 1.0.

In memory the fields of all blocks are kept apart, in as many bytes, because torch is fast on long runs only: of a row's
four-bit integers, the low halves of its bytes hold the first half and the high halves the second (``_halve``); of its
fifth bits, each bit of its bytes an eighth (``_eighths``). Blocks of the five rarer types stay as they are, and are
split for each product; the kernel keeps Q2_K and Q3_K in four bits, MXFP4 in five, IQ4_NL and IQ4_XS in eight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk_quant._linear_cpu.integers import Integers, Nested

if TYPE_CHECKING:
    from torch import Tensor

Fields = tuple["Tensor", ...]
"""The fields of a matrix' blocks, each [rows, ...]."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """``num_values`` values of a row in ``num_bytes`` bytes.

    split: blocks [rows, blocks, num_bytes] uint8 to their fields, once; unpack: the fields of some rows to [rows,
    columns] float32; integers: blocks as the native kernel's matrix. factors: which bytes of a block are float16
    factors, and which one is an exponent (255: not a number).
    """

    num_values: int
    num_bytes: int
    split: Callable[[Tensor], Fields]
    unpack: Callable[[Fields], Tensor]
    integers: Callable[[Tensor], Integers]
    factors: tuple[int, ...] = (0,)
    exponent: int | None = None

    def is_damaged(self, blocks: Tensor) -> bool:
        """Whether a factor of a block is no finite number."""
        if self.exponent is not None and bool((blocks[..., self.exponent] == 255).any()):
            return True
        return any(not bool(torch.isfinite(factor(blocks, start)).all()) for start in self.factors)


def factor(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block: [rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """packed: [rows, blocks, n] uint8 to [rows, blocks * 2 * n]: of each run the low halves, then the high ones."""
    runs = packed.unflatten(-1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), dim=3).flatten(1)


def _halve(numbers: Tensor) -> Tensor:
    """[rows, columns] uint8 below 16 to [rows, columns / 2] bytes: the first half low, the second high."""
    low, high = numbers.chunk(2, dim=1)
    return low | (high << 4)


def _halves(packed: Tensor) -> Tensor:
    """The other way."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _whole(halves: Tensor) -> Tensor:
    """The same to float32."""
    size = halves.shape[1]
    numbers = torch.empty(halves.shape[0], 2 * size, device=halves.device)
    numbers[:, :size] = halves & 15
    numbers[:, size:] = halves >> 4
    return numbers


def _eighths(bits: Tensor) -> Tensor:
    """[rows, columns] uint8 of 0 and 1 to [rows, columns / 8] bytes: the first eighth in the lowest bits."""
    parts = bits.chunk(8, dim=1)
    packed = parts[0].clone()
    for place in range(1, 8):
        packed |= parts[place] << place
    return packed


def _fives(halves: Tensor, fifths: Tensor) -> Tensor:
    """Numbers below 32, [rows, columns] uint8, of their low four bits and their fifth ones."""
    return _halves(halves) | torch.cat([(fifths >> place & 1) << 4 for place in range(8)], dim=1)


def _groups(numbers: Tensor, count: int) -> Tensor:
    """[rows, columns] as [rows, count, columns / count]; the same memory."""
    return numbers.unflatten(1, (count, -1))


def _split_q8_0(blocks: Tensor) -> Fields:
    return blocks[..., 2:].flatten(1).contiguous().view(torch.int8), factor(blocks, 0)


def _q8_0(fields: Fields) -> Tensor:
    numbers, d = fields[0].float(), fields[1]
    _groups(numbers, d.shape[1]).mul_(d.float().unsqueeze(-1))
    return numbers


def _eight_bits(fields: Fields) -> Integers:
    return Integers(8, fields[0].view(torch.uint8) ^ 128, 32, fields[1], 128)


def _integers_q8_0(blocks: Tensor) -> Integers:
    return _eight_bits(_split_q8_0(blocks))


def _split_q4_0(blocks: Tensor) -> Fields:
    return _halve(_nibbles(blocks[..., 2:], 16)), factor(blocks, 0)


def _q4_0(fields: Fields) -> Tensor:
    numbers, d = _whole(fields[0]), fields[1]
    _groups(numbers, d.shape[1]).sub_(8).mul_(d.float().unsqueeze(-1))
    return numbers


def _integers_q4_0(blocks: Tensor) -> Integers:
    return Integers(4, _nibbles(blocks[..., 2:], 16), 32, factor(blocks, 0), 8)


def _split_q4_1(blocks: Tensor) -> Fields:
    return _halve(_nibbles(blocks[..., 4:], 16)), factor(blocks, 0), factor(blocks, 2)


def _q4_1(fields: Fields) -> Tensor:
    numbers, d, m = _whole(fields[0]), fields[1], fields[2]
    _groups(numbers, d.shape[1]).mul_(d.float().unsqueeze(-1)).add_(m.float().unsqueeze(-1))
    return numbers


def _integers_q4_1(blocks: Tensor) -> Integers:
    return Integers(4, _nibbles(blocks[..., 4:], 16), 32, factor(blocks, 0), offsets=factor(blocks, 2))


def _split_q5(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The low bits and the fifth ones, packed, of blocks that end with both."""
    low, fifths = _parts_q5(blocks)
    return _halve(low), _eighths(fifths)


def _parts_q5(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The same, [rows, columns] each."""
    fifths = blocks[..., -20:-16].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    return _nibbles(blocks[..., -16:], 16), fifths.flatten(1)


def _numbers_q5(blocks: Tensor) -> Tensor:
    low, fifths = _parts_q5(blocks)
    return low.bitwise_or_(fifths << 4)


def _split_q5_0(blocks: Tensor) -> Fields:
    return *_split_q5(blocks), factor(blocks, 0)


def _q5_0(fields: Fields) -> Tensor:
    numbers, d = _fives(fields[0], fields[1]).float(), fields[2]
    _groups(numbers, d.shape[1]).sub_(16).mul_(d.float().unsqueeze(-1))
    return numbers


def _integers_q5_0(blocks: Tensor) -> Integers:
    return Integers(5, _numbers_q5(blocks), 32, factor(blocks, 0), 16)


def _split_q5_1(blocks: Tensor) -> Fields:
    return *_split_q5(blocks), factor(blocks, 0), factor(blocks, 2)


def _q5_1(fields: Fields) -> Tensor:
    numbers, d, m = _fives(fields[0], fields[1]).float(), fields[2], fields[3]
    _groups(numbers, d.shape[1]).mul_(d.float().unsqueeze(-1)).add_(m.float().unsqueeze(-1))
    return numbers


def _integers_q5_1(blocks: Tensor) -> Integers:
    return Integers(5, _numbers_q5(blocks), 32, factor(blocks, 0), offsets=factor(blocks, 2))


def _split_q4_k(blocks: Tensor) -> Fields:
    numbers = _halve(_nibbles(blocks[..., 16:], 32))
    return numbers, factor(blocks, 0), factor(blocks, 2), blocks[..., 4:16].contiguous()


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, blocks, 12] to scales and minima, [rows, blocks, 8] uint8 each."""
    # The low six bits of the first four bytes and the next four are scales and minima 0-3. Those of 4-7 have their low
    # four bits in the last four (scales low, minima high) and their top two in the top bits of the first eight.
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    return scales, torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)


def _scaled(numbers: Tensor, d: Tensor, m: Tensor, packed: Tensor) -> Tensor:
    """What integers, [rows, columns] float32, stand for in blocks of eight sub-blocks; in place."""
    scales, minima = (part.float() for part in _six_bits(packed))
    scales.mul_(d.float().unsqueeze(-1))
    minima.mul_(m.float().unsqueeze(-1))
    groups = _groups(numbers, 8 * d.shape[1])
    groups.mul_(scales.view(len(numbers), -1, 1)).sub_(minima.view(len(numbers), -1, 1))
    return numbers


def _nested(bits: int, numbers: Tensor, blocks: Tensor) -> Integers:
    scales, minima = (part.flatten(1).view(torch.int8) for part in _six_bits(blocks[..., 4:16]))
    return Integers(bits, numbers, 32, Nested(factor(blocks, 0), scales), offsets=Nested(-factor(blocks, 2), minima))


def _q4_k(fields: Fields) -> Tensor:
    return _scaled(_whole(fields[0]), *fields[1:])


def _integers_q4_k(blocks: Tensor) -> Integers:
    return _nested(4, _nibbles(blocks[..., 16:], 32), blocks)


def _fifths_q5_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    return (blocks[..., 16:48].unsqueeze(-2) >> shifts & 1).flatten(1)


def _split_q5_k(blocks: Tensor) -> Fields:
    numbers, fifths = _halve(_nibbles(blocks[..., 48:], 32)), _eighths(_fifths_q5_k(blocks))
    return numbers, fifths, factor(blocks, 0), factor(blocks, 2), blocks[..., 4:16].contiguous()


def _q5_k(fields: Fields) -> Tensor:
    return _scaled(_fives(fields[0], fields[1]).float(), *fields[2:])


def _integers_q5_k(blocks: Tensor) -> Integers:
    return _nested(5, _nibbles(blocks[..., 48:], 32).bitwise_or_(_fifths_q5_k(blocks) << 4), blocks)


def _parts_q6_k(blocks: Tensor) -> Fields:
    """Low four bits and high two, [rows, columns] each, scales and factors."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = ((blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3).flatten(1)
    scales = blocks[..., 192:208].flatten(1).contiguous().view(torch.int8)
    return _nibbles(blocks[..., :128], 64), high, scales, factor(blocks, 208)


def _split_q6_k(blocks: Tensor) -> Fields:
    low, high, scales, d = _parts_q6_k(blocks)
    first, second, third, fourth = high.chunk(4, dim=1)
    return _halve(low), first | (second << 2) | (third << 4) | (fourth << 6), scales, d


def _q6_k(fields: Fields) -> Tensor:
    halves, quarters, scales, d = fields
    size = quarters.shape[1]
    low = (halves & 15, halves >> 4)
    numbers = torch.empty(len(halves), 4 * size, device=halves.device)
    for place in range(4):
        part = low[place // 2][:, place % 2 * size : (place % 2 + 1) * size]
        numbers[:, place * size : (place + 1) * size] = part | (((quarters >> (2 * place)) & 3) << 4)
    factors = _groups(scales.float(), d.shape[1]).mul_(d.float().unsqueeze(-1))
    _groups(numbers, scales.shape[1]).sub_(32).mul_(factors.view(len(halves), -1, 1))
    return numbers


def _integers_q6_k(blocks: Tensor) -> Integers:
    low, high, scales, d = _parts_q6_k(blocks)
    return Integers(6, low.bitwise_or_(high << 4), 16, Nested(d, scales), 32)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _wide(numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers [rows, columns] int8, times the scale [rows, groups] float32 of each group."""
    values = numbers.float()
    _groups(values, scales.shape[1]).mul_(scales.unsqueeze(-1))
    return values


def _each(d: Tensor, scales: Tensor) -> Tensor:
    """Factors [rows, blocks] float16 times the integers [rows, blocks * n] of their sub-blocks, float32."""
    return _groups(scales.float(), d.shape[1]).mul_(d.float().unsqueeze(-1)).flatten(1)


def _pairs(packed: Tensor) -> Tensor:
    """packed: [rows, blocks, 64] uint8 to [rows, blocks, 8, 32] of two bits each."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(4, 1)
    return (packed.unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(2, 3)


def _kept(
    split: Callable[[Tensor], Fields], unpack: Callable[[Fields], Tensor], integers: Callable[[Fields], Integers]
) -> tuple[Callable[[Tensor], Fields], Callable[[Fields], Tensor], Callable[[Tensor], Integers]]:
    """``BlockType``'s functions of blocks that stay as they are."""
    return lambda blocks: (blocks,), lambda fields: unpack(split(fields[0])), lambda blocks: integers(split(blocks))


def _split_q2_k(blocks: Tensor) -> Fields:
    numbers = _pairs(blocks[..., 16:80]).flatten(1).view(torch.int8)
    packed = blocks[..., :16].flatten(1)
    return (
        numbers,
        (packed & 15).view(torch.int8),
        (packed >> 4).view(torch.int8),
        factor(blocks, 80),
        factor(blocks, 82),
    )


def _q2_k(fields: Fields) -> Tensor:
    numbers, scales, minima, d, m = fields
    values = _wide(numbers, _each(d, scales))
    _groups(values, scales.shape[1]).sub_(_each(m, minima).unsqueeze(-1))
    return values


def _integers_q2_k(fields: Fields) -> Integers:
    numbers, scales, minima, d, m = fields
    return Integers(4, numbers.view(torch.uint8), 16, Nested(d, scales), offsets=Nested(-m, minima))


def _split_q3_k(blocks: Tensor) -> Fields:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = (blocks[..., 104:108].unsqueeze(-2) >> shifts & 3).flatten(2) << 4
    low = torch.cat((blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4), dim=-1)
    scales = (low | high).flatten(1).view(torch.int8) - 32
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    third = blocks[..., :32].unsqueeze(-2) >> places & 1
    numbers = (_pairs(blocks[..., 32:96]) | third << 2).flatten(1).view(torch.int8) - 4
    return numbers, scales, factor(blocks, 108)


def _scaled_twice(fields: Fields) -> Tensor:
    numbers, scales, d = fields
    return _wide(numbers, _each(d, scales))


def _integers_q3_k(fields: Fields) -> Integers:
    numbers, scales, d = fields
    return Integers(4, (numbers + 4).view(torch.uint8), 16, Nested(d, scales), 4)


def _levels(packed: Tensor, levels: tuple[int, ...]) -> Tensor:
    """packed: [rows, blocks, n] uint8 to [rows, blocks * 2 * n] int8 of ``levels``."""
    table = torch.tensor(levels, dtype=torch.int8, device=packed.device)
    return table[_nibbles(packed, 16).int()]


def _split_iq4_nl(blocks: Tensor) -> Fields:
    return _levels(blocks[..., 2:], LEVELS), factor(blocks, 0)


def _scaled_once(fields: Fields) -> Tensor:
    return _wide(fields[0], fields[1].float())


def _split_iq4_xs(blocks: Tensor) -> Fields:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:4].unsqueeze(-1) >> shifts & 3).flatten(2) << 4
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(2)
    scales = (low | high).flatten(1).view(torch.int8) - 32
    return _levels(blocks[..., 8:], LEVELS), scales, factor(blocks, 0)


def _integers_iq4_xs(fields: Fields) -> Integers:
    numbers, scales, d = fields
    return Integers(8, numbers.view(torch.uint8) ^ 128, 32, Nested(d, scales), 128)


def _split_mxfp4(blocks: Tensor) -> Fields:
    e = blocks[..., 0].int()
    scales = torch.where(e < 2, 0x200000 << e, (e - 1) << 23).view(torch.float32)  # 2^(e - 128)
    return _levels(blocks[..., 1:], TWICE_E2M1), scales


def _integers_mxfp4(fields: Fields) -> Integers:
    return Integers(5, (fields[0] + 12).view(torch.uint8), 32, fields[1], 12)


BLOCK_TYPES: dict[str, BlockType] = {
    "gguf:Q8_0": BlockType(32, 34, _split_q8_0, _q8_0, _integers_q8_0),
    "gguf:Q4_0": BlockType(32, 18, _split_q4_0, _q4_0, _integers_q4_0),
    "gguf:Q4_1": BlockType(32, 20, _split_q4_1, _q4_1, _integers_q4_1, (0, 2)),
    "gguf:Q5_0": BlockType(32, 22, _split_q5_0, _q5_0, _integers_q5_0),
    "gguf:Q5_1": BlockType(32, 24, _split_q5_1, _q5_1, _integers_q5_1, (0, 2)),
    "gguf:Q4_K": BlockType(256, 144, _split_q4_k, _q4_k, _integers_q4_k, (0, 2)),
    "gguf:Q5_K": BlockType(256, 176, _split_q5_k, _q5_k, _integers_q5_k, (0, 2)),
    "gguf:Q6_K": BlockType(256, 210, _split_q6_k, _q6_k, _integers_q6_k, (208,)),
    "gguf:Q2_K": BlockType(256, 84, *_kept(_split_q2_k, _q2_k, _integers_q2_k), (80, 82)),
    "gguf:Q3_K": BlockType(256, 110, *_kept(_split_q3_k, _scaled_twice, _integers_q3_k), (108,)),
    "gguf:IQ4_NL": BlockType(32, 18, *_kept(_split_iq4_nl, _scaled_once, _eight_bits)),
    "gguf:IQ4_XS": BlockType(256, 136, *_kept(_split_iq4_xs, _scaled_twice, _integers_iq4_xs)),
    "gguf:MXFP4": BlockType(32, 17, *_kept(_split_mxfp4, _scaled_once, _integers_mxfp4), (), 0),
}
"""By the name of the layout."""
