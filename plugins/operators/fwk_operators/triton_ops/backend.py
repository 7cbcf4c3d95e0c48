"""Launches the kernels: one for each operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from fwk.errors import ModelLoadError
from fwk.interfaces.operators import Operators
from fwk.interfaces.quant import RoundedRows
from fwk_operators.triton_ops import kernels
from fwk_tiles.launches import power_of_two
from fwk_tiles.numbers import ACTIVATIONS

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = 1024
"""In one program: eight for each of 128 threads, which are one load of 128 bits in half precision."""


class TritonOperators(Operators):
    """Each operator in one launch."""

    rounds = True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False) -> Tensor:
        return _norm(x, None, weight, eps, rounds_last)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False
    ) -> Tensor:
        if not residual.is_contiguous():
            return _norm(residual.add_(x), None, weight, eps, rounds_last)[0]
        return _norm(x, residual, weight, eps, rounds_last)[0]

    def add_rms_norm_rounded(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, group: int, *, rounds_last: bool = False
    ) -> RoundedRows:
        if residual is not None and not residual.is_contiguous():
            x, residual = residual.add_(x), None
        numbers, scales = _norm(x, residual, weight, eps, rounds_last, group)
        return RoundedRows(numbers.view(torch.float8_e4m3fn), scales, x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        num_tokens, heads, _ = x.shape
        half = cos.shape[-1] // 2
        width, rows = _tile(half)
        _launch(
            kernels.rotate_rows,
            (triton.cdiv(num_tokens * heads, rows), 1),
            x,
            x.stride(0),
            x.stride(1),
            cos,
            cos.stride(0),
            sin,
            sin.stride(0),
            num_tokens * heads,
            HEADS=heads,
            HALF=half,
            WIDTH=width,
            ROWS=rows,
        )

    def gate(self, x: Tensor, activation: str) -> Tensor:
        return self._gate(x, activation, NUMBERS, 0)[0]

    def gate_rounded(self, x: Tensor, activation: str, group: int) -> RoundedRows:
        width = max(_tile(min(group, x.shape[1] // 2))[0], NUMBERS)  # whole groups in one program
        numbers, scales = self._gate(x, activation, width, group)
        return RoundedRows(numbers.view(torch.float8_e4m3fn), scales, x.dtype)

    @staticmethod
    def _gate(x: Tensor, activation: str, width: int, group: int) -> tuple[Tensor, Tensor]:
        code = ACTIVATIONS.get(activation)
        if code is None:
            raise ModelLoadError(f"activation {activation!r} is not known; these kernels do {', '.join(ACTIVATIONS)}")
        num_tokens, size = x.shape[0], x.shape[1] // 2
        out, scales, groups = _room(x, (num_tokens, size), width, group)
        grid = (num_tokens, triton.cdiv(size, width))
        sizes = {"SIZE": size, "WIDTH": width, "ACTIVATION": code.value, "GROUPS": groups}
        warps = min(max(width // NUMBERS * 4, 4), 16)
        _launch(kernels.gate_rows, grid, x, x.stride(0), out, scales, **sizes, num_warps=warps)
        return out, scales

    def rows(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        flat = table.flatten(1) if table.dim() > 1 else table.unsqueeze(1)
        out = table.new_empty(len(indices), *table.shape[1:])
        size = flat.shape[1]
        _launch(
            kernels.table_rows,
            (len(indices), triton.cdiv(size, NUMBERS)),
            flat,
            flat.stride(0),
            indices,
            out,
            1.0 if scale is None else scale,
            SIZE=size,
            WIDTH=NUMBERS,
            SCALES=scale is not None,
        )
        return out


def _room(x: Tensor, shape: tuple[int, ...], width: int, group: int) -> tuple[Tensor, Tensor, int]:
    """Outputs of ``shape``, their scales, and how many groups ``width`` numbers are; group 0: none, and x's type."""
    if not group:
        out = x.new_empty(shape)
        return out, out, 0
    out = torch.empty(shape, dtype=torch.uint8, device=x.device)
    size = shape[-1]
    group = min(group, size)
    scales = torch.empty(shape[0], triton.cdiv(size, group), dtype=torch.float32, device=x.device)
    return out, scales, 1 if group == size else width // group


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rounds_last: bool, group: int = 0
) -> tuple[Tensor, Tensor]:
    """x: [num_tokens, size] or [num_tokens, heads, size], with a residual or a group the former."""
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    width, rows = _tile(size)
    out, scales, groups = _room(x, tuple(x.shape), width, group)
    num_rows = x.shape[0] * heads
    _launch(
        kernels.norm_rows,
        (triton.cdiv(num_rows, rows), 1),
        x,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        x if residual is None else residual,
        weight,
        weight.stride(0) if weight.dim() == 2 else 0,
        out,
        scales,
        num_rows,
        eps,
        HEADS=heads,
        SIZE=size,
        WIDTH=width,
        ROWS=rows,
        ADDS=residual is not None,
        ROUNDS_LAST=rounds_last,
        GROUPS=groups,
        num_warps=min(max(width * rows // NUMBERS * 4, 4), 16),
    )
    return out, scales


def _tile(size: int) -> tuple[int, int]:
    """Columns as a power of two, and how many such rows a program takes on."""
    width = power_of_two(size)
    return width, max(1, NUMBERS // width)


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Arguments of a kernel are what its decorator makes of them: no type checker knows it."""
    if all(grid):
        kernel[grid](*arguments, **constants, IS_INTERPRETED=not arguments[0].is_cuda)
