"""Random packed matrices, and the numbers they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from fwk.interfaces.quant import PackedNumbers


def packed_matrix(
    kind: str, groups: int, has_zeros: bool, row_block: int, rows: int, columns: int, random: torch.Generator
) -> tuple[PackedNumbers, Tensor]:
    """``kind`` as ``PackedNumbers`` names it; the numbers [rows, columns] in float32."""
    width = columns // groups
    low, high = (0, 16) if kind == "int4" else (-127, 128)
    numbers = torch.randint(low, high, (rows, columns), generator=random)
    scales = torch.rand(-(-rows // row_block), groups, generator=random) / (high - low) / columns**0.5 * 4
    zeros = torch.randint(max(low, -9), 10, (rows, groups), generator=random) if has_zeros else None
    values = numbers.float()
    if kind == "e4m3":
        values = (values / 4).to(torch.float8_e4m3fn).float()
        packed = values.to(torch.float8_e4m3fn)
    elif kind == "int4":
        left, right = numbers.to(torch.uint8).chunk(2, 1)
        packed = left | right << 4
    else:
        packed = numbers.to(torch.int8)
    subtracted = torch.full((rows, groups), 8 if kind == "int4" else 0) if zeros is None else zeros
    each = scales.repeat_interleave(row_block, 0)[:rows]
    plain = (values.view(rows, groups, width) - subtracted.unsqueeze(-1)) * each.unsqueeze(-1)
    stored = None if zeros is None else zeros.to(torch.uint8 if kind == "int4" else torch.int16)
    return PackedNumbers(kind, packed, scales, stored, row_block, width), plain.flatten(1)
