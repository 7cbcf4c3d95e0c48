"""Products of e4m3 activations and e4m3 weights (W8A8), with scales for rows or for blocks, by torch's scaled mm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.interfaces.quant import RoundedRows

LARGEST = 448.0
"""The largest number of e4m3 (the variant without infinities)."""

BLOCK = 128
"""Features along either side of a matrix that share a scale, where scales are in blocks."""

SMALLEST = 1e-12
"""Of a scale of activations, so that a row of zeros divides by something."""

MULTIPLE = 16
"""What the scaled products want both sides of a matrix to be a multiple of."""


def why_not(rows: int, columns: int, *, is_block: bool, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why there is no scaled product for such a matrix, as a predicate; None when there is."""
    if rows % MULTIPLE or columns % (BLOCK if is_block else MULTIPLE):
        wanted = f"{MULTIPLE} outputs and {BLOCK if is_block else MULTIPLE} inputs"
        return f"has {rows} outputs and {columns} inputs, which are no multiples of {wanted}"
    if device.type != "cuda":
        return None if dtype in (torch.bfloat16, torch.float32) else "computes in bfloat16 or float32"
    if torch.version.hip is not None:
        return "is not offered on AMD's devices, some of which have another e4m3"
    if dtype != torch.bfloat16:
        return "computes in bfloat16 on a cuda device"
    found = torch.cuda.get_device_capability(device)
    if is_block:
        return (
            None if found == (9, 0) else f"needs compute capability 9.0 for scales in blocks, this device has {found}"
        )
    return None if found >= (8, 9) else f"needs compute capability 8.9, this device has {found}"


def padded_block_scales(scales: Tensor) -> Tensor:
    """The same numbers at rows a multiple of four apart, as cuBLASLt wants scales of blocks."""
    apart = F.pad(scales, (0, -scales.shape[1] % 4)).contiguous()
    return apart[:, : scales.shape[1]]


def row_product(x: Tensor, numbers: Tensor, scales: Tensor, input_scale: Tensor | None) -> Tensor:
    """x [n, columns] times numbers [rows, columns] * scales [rows], transposed. input_scale: [] where it is known."""
    if input_scale is None:
        return row_product_of(RoundedRows(*quantise(x), x.dtype), numbers, scales)
    of_tokens = input_scale.expand(x.shape[0], 1).contiguous()
    return row_product_of(RoundedRows(_round(x.float() / of_tokens), of_tokens, x.dtype), numbers, scales)


def row_product_of(x: RoundedRows, numbers: Tensor, scales: Tensor) -> Tensor:
    """The same of inputs that are rounded already, with a scale a row."""
    return scaled_mm(x.numbers, numbers, x.scales, scales[None], x.dtype)


def block_product(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """As ``row_product``, for scales [rows / BLOCK, columns / BLOCK]; x gets one for each BLOCK numbers of a token."""
    return block_product_of(RoundedRows(*quantise(x, BLOCK), x.dtype), numbers, scales)


def block_product_of(x: RoundedRows, numbers: Tensor, scales: Tensor) -> Tensor:
    """The same of inputs that are rounded already, with a scale for each BLOCK numbers."""
    rounded, of_groups = x.numbers, x.scales
    if rounded.device.type == "cuda":
        apart = of_groups.t().contiguous().t()  # along tokens first
        return scaled_mm(rounded, numbers, apart, scales.t(), x.dtype)
    of_rows = scales.repeat_interleave(BLOCK, 0)[: numbers.shape[0]]
    y = torch.zeros(x.shape[0], numbers.shape[0], device=rounded.device)
    for i, (part, block) in enumerate(zip(rounded.split(BLOCK, 1), numbers.split(BLOCK, 1), strict=True)):
        of_tokens = of_groups[:, i : i + 1].contiguous()
        y += scaled_mm(part.contiguous(), block.contiguous(), of_tokens, of_rows[:, i][None].contiguous(), y.dtype)
    return y.to(x.dtype)


def scaled_mm(x: Tensor, numbers: Tensor, of_x: Tensor, of_numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ numbers.T, both of e4m3 and scaled; ``of_numbers`` is for the transposed matrix."""
    return torch.ops.aten._scaled_mm(x, numbers.t(), of_x, of_numbers, out_dtype=dtype)


def quantise(x: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """x [n, columns] as e4m3 numbers and float32 scales [n, columns / size]: the largest becomes ``LARGEST``."""
    groups = x.float().unflatten(1, (-1, size or x.shape[1]))
    scales = (groups.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST)
    return _round(groups / scales).flatten(1), scales.squeeze(-1)


def _round(x: Tensor) -> Tensor:
    return x.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
