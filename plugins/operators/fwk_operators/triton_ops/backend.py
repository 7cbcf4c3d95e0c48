"""Launches the kernels: one for each operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

from fwk.errors import ModelLoadError
from fwk.interfaces.operators import Operators
from fwk_operators.triton_ops import kernels
from fwk_tiles.numbers import ACTIVATIONS

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = 1024
"""In one program: eight for each of 128 threads, which are one load of 128 bits in half precision."""


class TritonOperators(Operators):
    """Each operator in one launch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False) -> Tensor:
        return _norm(x, None, weight, eps, rounds_last)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False
    ) -> Tensor:
        if not residual.is_contiguous():
            return _norm(residual.add_(x), None, weight, eps, rounds_last)
        return _norm(x, residual, weight, eps, rounds_last)

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
        code = ACTIVATIONS.get(activation)
        if code is None:
            raise ModelLoadError(f"activation {activation!r} is not known; these kernels do {', '.join(ACTIVATIONS)}")
        num_tokens, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(num_tokens, size)
        grid = (num_tokens, triton.cdiv(size, NUMBERS))
        _launch(kernels.gate_rows, grid, x, x.stride(0), out, SIZE=size, WIDTH=NUMBERS, ACTIVATION=code.value)
        return out

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


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rounds_last: bool) -> Tensor:
    """x: [num_tokens, size] or [num_tokens, heads, size], with a residual the former."""
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    out = x.new_empty(x.shape)
    width, rows = _tile(size)
    num_rows = x.shape[0] * heads
    _launch(
        kernels.norm_rows,
        (triton.cdiv(num_rows, rows), 1),
        x,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        out if residual is None else residual,
        weight,
        weight.stride(0) if weight.dim() == 2 else 0,
        out,
        num_rows,
        eps,
        HEADS=heads,
        SIZE=size,
        WIDTH=width,
        ROWS=rows,
        ADDS=residual is not None,
        ROUNDS_LAST=rounds_last,
        num_warps=min(max(width * rows // NUMBERS * 4, 4), 16),
    )
    return out


def _tile(size: int) -> tuple[int, int]:
    """Columns as a power of two, and how many such rows a program takes on."""
    width = 1 << (size - 1).bit_length()
    return width, max(1, NUMBERS // width)


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Arguments of a kernel are what its decorator makes of them: no type checker knows it."""
    if all(grid):
        kernel[grid](*arguments, **constants, IS_INTERPRETED=not arguments[0].is_cuda)
