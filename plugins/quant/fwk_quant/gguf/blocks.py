"""From the blocks of GGUF files to numbers, exactly as ggml computes them in float32.

``d`` and ``m`` are float16 factors of a block; ``q`` are small integers. Two four-bit integers share a byte: of a run
of bytes, the low halves come first, then the high halves.

=====  ======  =====  =============================================  ==================================
type   values  bytes  in order                                       value
=====  ======  =====  =============================================  ==================================
Q8_0   32      34     d, 32 signed q                                 q * d
Q4_0   32      18     d, 16 with q                                   (q - 8) * d
Q4_1   32      20     d, m, 16 with q                                q * d + m
Q4_K   256     144    d, m, 12 with scales, 128 with q in runs of 32  q * (d * scale) - m * minimum
Q6_K   256     210    128 with low bits in runs of 64, 64 with two   (q - 32) * (d * scale)
                      high bits, 16 signed scales, d
=====  ======  =====  =============================================  ==================================

A Q4_K block has eight sub-blocks of 32, with a six-bit scale and minimum each; a Q6_K block sixteen of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockType:
    """``num_values`` values of a row in ``num_bytes`` bytes.

    unpack: blocks [rows, blocks, num_bytes] uint8 to [rows, blocks, num_values] float32 or any finer shape.
    factors: byte offsets of a block's float16 factors.
    """

    num_values: int
    num_bytes: int
    unpack: Callable[[Tensor], Tensor]
    factors: tuple[int, ...] = (0,)


def factor(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block: [rows, blocks, 1] float32."""
    return blocks[..., start : start + 2].view(torch.float16).float()


def _halves(packed: Tensor, run: int) -> Tensor:
    """packed: [rows, blocks, n] uint8 to [rows, blocks, 2 * n / run, run] float32: of each run the low halves, then
    the high ones."""
    runs = packed.unflatten(-1, (-1, run))
    out = torch.empty(*runs.shape[:3], 2, run, device=packed.device)
    out[..., 0, :] = runs & 15
    out[..., 1, :] = runs >> 4
    return out.flatten(2, 3)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8).float().mul_(factor(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., 2:], 16).flatten(2).sub_(8).mul_(factor(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., 4:], 16).flatten(2).mul_(factor(blocks, 0)).add_(factor(blocks, 2))


def _q4_k(blocks: Tensor) -> Tensor:
    # Of bytes 4-7, 8-11 and 12-15: the low six bits of the first two are scales and minima 0-3. Those of 4-7 have their
    # low four bits in the third (scales low, minima high) and the top two in the top bits of the first two.
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1).float()
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1).float()
    numbers = _halves(blocks[..., 16:], 32)
    numbers.mul_(scales.mul_(factor(blocks, 0)).unsqueeze(-1))
    return numbers.sub_(minima.mul_(factor(blocks, 2)).unsqueeze(-1))


def _q6_k(blocks: Tensor) -> Tensor:
    numbers = _halves(blocks[..., :128], 64).unflatten(-1, (2, 32)).flatten(2, 3)  # eight runs of 32
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    numbers.add_((high << 4).flatten(2, 3)).sub_(32)
    scales = blocks[..., 192:208].view(torch.int8).float().mul_(factor(blocks, 208))
    return numbers.flatten(2).unflatten(-1, (16, 16)).mul_(scales.unsqueeze(-1))


BLOCK_TYPES: dict[str, BlockType] = {
    "gguf:Q8_0": BlockType(32, 34, _q8_0),
    "gguf:Q4_0": BlockType(32, 18, _q4_0),
    "gguf:Q4_1": BlockType(32, 20, _q4_1, (0, 2)),
    "gguf:Q4_K": BlockType(256, 144, _q4_k, (0, 2)),
    "gguf:Q6_K": BlockType(256, 210, _q6_k, (208,)),
}
"""By the name of the layout."""
