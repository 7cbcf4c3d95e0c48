"""Products of e4m3 activations and e4m3 weights (W8A8), with scales for rows or for blocks, by torch's scaled mm."""

from __future__ import annotations

import functools
from collections.abc import Callable

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


Product = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""``scaled_mm``."""


def why_not(rows: int, columns: int, *, is_block: bool, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why there is no scaled product for such a matrix, as a predicate; None when there is."""
    if rows % MULTIPLE or columns % (BLOCK if is_block else MULTIPLE):
        wanted = f"{MULTIPLE} outputs and {BLOCK if is_block else MULTIPLE} inputs"
        return f"has {rows} outputs and {columns} inputs, which are no multiples of {wanted}"
    if device.type != "cuda":
        if dtype not in (torch.bfloat16, torch.float32):
            return "computes in bfloat16 or float32"
        return _why_not_on_cpu(scaled_mm)
    if torch.version.hip is not None:
        return "is not offered on AMD's devices, some of which have another e4m3"
    if dtype != torch.bfloat16:
        return "computes in bfloat16 on a cuda device"
    found = torch.cuda.get_device_capability(device)
    if is_block:
        if found != (9, 0):
            return f"needs compute capability 9.0 for scales in blocks, this device has {found}"
        if columns // BLOCK % 4 and scale_spacing(device) is None:
            return f"takes no scales of {columns // BLOCK} blocks a row in torch {torch.__version__}"
        return None
    return None if found >= (8, 9) else f"needs compute capability 8.9, this device has {found}"


@functools.cache
def _why_not_on_cpu(product: Product) -> str | None:
    """torch 2.11 has the operator on a CPU, but fails for scales of rows."""
    ones = torch.ones(MULTIPLE, MULTIPLE).to(torch.float8_e4m3fn)
    try:
        product(ones, ones, torch.ones(MULTIPLE, 1), torch.ones(1, MULTIPLE), torch.float32)
    except (RuntimeError, ValueError):
        return f"takes no scales of rows on a CPU in torch {torch.__version__}: 2.13 does"
    return None


def padded_block_scales(scales: Tensor, multiple: int = 4) -> Tensor:
    """The same numbers at rows a multiple of ``multiple`` apart (``scale_spacing``)."""
    apart = F.pad(scales, (0, -scales.shape[1] % multiple)).contiguous()
    return apart[:, : scales.shape[1]]


def scale_spacing(device: torch.device) -> int | None:
    """Of what number of scales the rows of blocks' scales are a multiple apart; None: there is no product of them.

    cuBLASLt reads them at multiples of four. torch checks that in some versions; in others it wants rows next to each
    other, which is the same unless a row's number of blocks is no multiple of four.
    """
    return _spacing(device, scaled_mm)


@functools.cache
def _spacing(device: torch.device, product: Product) -> int | None:
    """The first that multiplies 2 blocks a row as it should: torch may accept what its kernels read wrongly."""
    side = 2 * BLOCK
    numbers = torch.ones(side, side, device=device).to(torch.float8_e4m3fn)
    of_numbers = torch.tensor([[1.0, 2.0], [4.0, 8.0]], device=device)
    of_x = torch.ones(2, MULTIPLE, device=device).t()
    wanted = (of_numbers.sum(1) * BLOCK).repeat_interleave(BLOCK)
    for multiple in (4, 1):
        scales = padded_block_scales(of_numbers, multiple).t()
        try:
            found = product(numbers[:MULTIPLE], numbers, of_x, scales, torch.bfloat16)
        except (RuntimeError, ValueError):
            continue
        if bool((found.float() == wanted).all()):
            return multiple
    return None


def row_product(
    x: Tensor, numbers: Tensor, scales: Tensor, input_scale: Tensor | None, *, is_fast: bool = False
) -> Tensor:
    """x [n, columns] times numbers [rows, columns] * scales [rows], transposed. input_scale: [] where it is known."""
    if input_scale is None:
        return row_product_of(RoundedRows(*quantise(x), x.dtype), numbers, scales, is_fast=is_fast)
    of_tokens = input_scale.expand(x.shape[0], 1).contiguous()
    rounded = RoundedRows(_round(x.float() / of_tokens), of_tokens, x.dtype)
    return row_product_of(rounded, numbers, scales, is_fast=is_fast)


def row_product_of(x: RoundedRows, numbers: Tensor, scales: Tensor, *, is_fast: bool = False) -> Tensor:
    """The same of inputs that are rounded already, with a scale a row. is_fast: sums may lose their last bits."""
    return scaled_mm(x.numbers, numbers, x.scales, scales[None], x.dtype, is_fast=is_fast)


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


def scaled_mm(
    x: Tensor, numbers: Tensor, of_x: Tensor, of_numbers: Tensor, dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """x @ numbers.T, both of e4m3 and scaled; ``of_numbers`` is for the transposed matrix."""
    product = torch.ops.aten._scaled_mm
    return product(x, numbers.t(), of_x, of_numbers, out_dtype=dtype, use_fast_accum=is_fast)


def quantise(x: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """x [n, columns] as e4m3 numbers and float32 scales [n, columns / size]: the largest becomes ``LARGEST``."""
    groups = x.float().unflatten(1, (-1, size or x.shape[1]))
    scales = (groups.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST)
    return _round(groups / scales).flatten(1), scales.squeeze(-1)


def _round(x: Tensor) -> Tensor:
    return x.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
