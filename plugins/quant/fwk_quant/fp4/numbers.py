"""Numbers of four bits and their scales.

e2m1 (OCP Microscaling Formats 1.0): a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; two in a byte, the earlier column in
the low half. NVFP4: 16 of a row share a scale in e4m3, and a matrix a factor in float32. MXFP4: 32 share a power of
two, stored as its exponent plus 127 (e8m0); 255 is no number. Those from 2^-23 to 2^15 are float16's when halved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk_quant._linear_cpu.integers import Integers

if TYPE_CHECKING:
    from torch import Tensor

NVFP4_BLOCK = 16
MXFP4_BLOCK = 32
LARGEST = 6.0
LARGEST_SCALE = 448.0
"""Of e4m3."""

TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
"""By code without its sign: twice the number."""

ZERO = 12
"""What makes ``TWICE`` with a sign an unsigned integer."""

TIES_TO_EVEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the numbers of two codes; a number in the middle gets the even code."""

ROUNDED_AT_ONCE = 2**21
"""Numbers that are rounded together: what rounding makes of a head's in between would fill memory."""


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    """packed: [rows, columns / 2] uint8. scales: [rows, blocks] float8_e4m3fn, or uint8 for e8m0. factors: [rows]
    float32.

    The value of a number is ``number * scale * factor``.
    """

    packed: Tensor
    scales: Tensor
    factors: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def dense(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows as numbers; computed in float32 and rounded once."""
        numbers = _looked_up(self.packed[start:stop], [x / 2 for x in _signed()], torch.float32)
        numbers.unflatten(1, (self.scales.shape[1], -1)).mul_(self._scales(start, stop).unsqueeze(-1))
        return numbers.to(dtype)

    def for_kernel(self) -> Callable[[int, int], Integers]:
        """The same for the native kernel, by slices of rows. It takes blocks of 16 in six bits, those of 32 in five."""
        group = self.size[1] // self.scales.shape[1]
        bits = 6 if group < MXFP4_BLOCK else 5
        is_half = self.scales.dtype == torch.uint8 and bool(((self.scales >= 104) & (self.scales <= 142)).all())
        unsigned = [x + ZERO for x in _signed()]

        def rows(start: int, stop: int) -> Integers:
            numbers = _looked_up(self.packed[start:stop], unsigned, torch.uint8)
            scales = self._scales(start, stop) / 2
            return Integers(bits, numbers, group, scales.half() if is_half else scales, ZERO)

        return rows

    def _scales(self, start: int, stop: int) -> Tensor:
        """[rows, blocks] float32."""
        scales = self.scales[start:stop]
        if scales.dtype == torch.uint8:
            scales = torch.exp2(scales.float() - 127)
        return scales.float() * self.factors[start:stop, None]


def is_damaged(matrix: Fp4Matrix) -> bool:
    """Whether a scale or factor is infinite or no number."""
    codes = matrix.scales.view(torch.uint8)
    no_number = codes == 255 if matrix.scales.dtype == torch.uint8 else (codes & 127) == 127
    return bool(no_number.any()) or not bool(torch.isfinite(matrix.factors).all())


def rounded(weight: Tensor) -> dict[str, Tensor]:
    """A matrix [rows, columns] in NVFP4, in the names of ModelOpt's checkpoints; columns are whole blocks.

    weight: [rows, columns / 2] uint8, weight_scale: [rows, blocks] float8_e4m3fn, weight_scale_2: [] float32. The
    largest number of the matrix gets the largest scale, that of a block the largest number, as in NVIDIA's
    "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149), appendix C.
    """
    largest = weight.abs().max().float()
    factor = torch.where(largest > 0, largest / (LARGEST * LARGEST_SCALE), torch.ones_like(largest))
    rows = weight.split(max(1, ROUNDED_AT_ONCE // max(1, weight.shape[1])))
    packed, scales = zip(*(_rounded(some.float(), factor) for some in rows), strict=True)
    return {"weight": torch.cat(packed), "weight_scale": torch.cat(scales), "weight_scale_2": factor}


def _rounded(weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.unflatten(1, (-1, NVFP4_BLOCK))
    wanted = blocks.abs().amax(-1) / (LARGEST * factor)
    scales = wanted.clamp_(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    steps = (scales.float() * factor).unsqueeze(-1)
    sizes = torch.where(steps > 0, blocks.abs() / steps, torch.zeros_like(blocks))
    # A code is the number of bounds below; from an odd code on, a number at the bound is beyond it.
    bounds = torch.tensor(TIES_TO_EVEN, device=weight.device)
    bounds[1::2] = bounds[1::2].nextafter(torch.zeros(1, device=weight.device))
    codes = torch.bucketize(sizes, bounds, out_int32=True).to(torch.uint8)
    codes |= (blocks < 0).to(torch.uint8) << 3
    codes = codes.flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def _signed() -> list[int]:
    return [*TWICE, *(-x for x in TWICE)]


def _looked_up(packed: Tensor, values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
    """values: by code. [rows, columns / 2] to [rows, columns], of which two are looked up at once."""
    pairs = [[values[byte & 15], values[byte >> 4]] for byte in range(256)]
    return torch.tensor(pairs, dtype=dtype, device=packed.device)[packed.int()].flatten(1)
