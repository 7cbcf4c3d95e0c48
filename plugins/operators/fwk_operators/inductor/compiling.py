"""Operators as plain functions, and what torch.compile makes of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounds_last: bool) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype) if rounds_last else normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounds_last: bool) -> Tensor:
    return rms_norm(residual.add_(x), weight, eps, rounds_last)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[-1] // 2
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * cos[..., :half] + second * sin[..., :half], second * cos[..., half:] + first * sin[..., half:]
    first.copy_(turned[0])
    second.copy_(turned[1])


def gate(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return activation(first) * second


class Layout(NamedTuple):
    """Of a tensor argument. Of one with a row for each row of the step, the first size is left out (-1)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def example(self, num_rows: int, device: torch.device) -> Tensor:
        """Zeros laid out so; of a tensor with rows, so many, and their number is not to be written into a kernel."""
        has_rows = bool(self.shape) and self.shape[0] < 0
        shape = (num_rows, *self.shape[1:]) if has_rows else self.shape
        made = torch.empty_strided(shape, self.strides, dtype=self.dtype, device=device).zero_()
        if has_rows:
            torch._dynamo.mark_dynamic(made, 0)
        return made


class Signature(NamedTuple):
    """All that is written into a kernel: the function, its arguments but the tensors, and how those are laid out."""

    function: Callable[..., Any]
    constants: tuple[Any, ...]
    layouts: tuple[Layout, ...]

    def __str__(self) -> str:
        sizes = ", ".join(str(["rows" if size < 0 else size for size in layout.shape]) for layout in self.layouts)
        return f"{self.function.__name__} of {sizes}".replace("'", "")


OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # rounds where the functions say so
    "triton.cudagraphs": False,  # steps are captured as wholes
    "compile_threads": 1,  # in this process: there is one kernel to compile at a time, and no process is left behind
}


@cache
def compiled(signature: Signature, num_rows: int, device: torch.device, num_threads: int) -> Callable[..., Any]:
    """What computes the function of tensors so laid out, of up to ``num_rows`` rows, on a CPU by so many threads.

    It has run once, so all that it is made of is loaded. Raises what torch.compile raises.
    """
    function, constants = signature.function, signature.constants

    def call(*tensors: Tensor) -> Any:
        return function(*tensors, *constants)

    examples = tuple(layout.example(max(2, num_rows), device) for layout in signature.layouts)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)  # their number is written into the kernel; loading leaves some of them idle
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of parts of torch
            compiler: Any = torch.compile(call, fullgraph=True, options=OPTIONS)
            made = compiler.aot_compile((examples, {}))
        made.disable_guard_check()  # the signature is what it would find, and other threads or a row alone no reason
        made(*examples)
    finally:
        torch.set_num_threads(before)
    return made
