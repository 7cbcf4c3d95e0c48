"""Unquantised linear layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import fwk_native as native
from fwk.interfaces.native import NativeLinear
from fwk.interfaces.quant import LinearShape, ParamSpec, QuantContext, QuantMethod
from fwk.interfaces.weights_cache import PackedTensors
from fwk_quant._linear_cpu.kernel import FloatKernel, PackedMatrix, ScreenedMatrix
from fwk_quant._linear_cpu.packed import from_packed, layout_version, to_packed

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

PACKED_FOR_TOKENS = 512
"""Batch size told to oneDNN when it picks a layout. Measured with 1, 8, 32, 128 and 512 tokens a step: in bfloat16
all hints do equally well, in float32 a small one costs 8 tokens or more up to 1.8 times as much."""


class PlainMethod(QuantMethod):
    """``x @ weight.T``: on a CPU by the native kernel, else by oneDNN on weights packed beforehand, else by torch.

    On a device a deterministic run has a kernel of its own (``invariant``).
    """

    def __init__(self, context: QuantContext) -> None:
        super().__init__(context)
        is_cpu = context.device.type == "cpu"
        self.why_not_native = _why_not_native(context)
        self.why_unpacked = None if self.why_not_native is None else _why_unpacked(context)
        shortens = context.options is None or context.options.shorten_weights
        is_native = self.why_not_native is None
        self._kernel = FloatKernel(context.threads, shortens=shortens) if is_native else None
        self._invariant: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        if context.is_deterministic and not is_cpu:
            from fwk_quant.none.invariant import linear  # noqa: PLC0415 - it needs Triton

            self._invariant = linear
        self._screens = context.options is None or context.options.screen_head
        self.can_embed = self._kernel is not None or self.why_unpacked is not None
        if is_cpu and self.why_not_native is not None:
            way = "oneDNN" if self.why_unpacked is None else f"torch on unpacked weights ({self.why_unpacked})"
            logger.warning("linear layers run by %s, more slowly: the native kernel %s", way, self.why_not_native)

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(output_dim=0, input_dim=1, dtype=shape.dtype)}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Tensor | PackedMatrix:
        """The weight in the kernel's layout; what was loaded is not kept."""
        weight = loaded["weight"]
        if self._kernel is not None:
            return self._kernel.pack(weight)
        if self.why_unpacked is not None:
            return weight
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_TOKENS)

    def apply(self, weights: Tensor | PackedMatrix | ScreenedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(weights, ScreenedMatrix):
            assert self._kernel is not None
            assert bias is None, "an LM head has none"
            return self._kernel.largest(weights, x)
        if isinstance(weights, PackedMatrix):
            assert self._kernel is not None
            return self._kernel.apply(weights, x, bias)
        if self._invariant is not None:
            return self._invariant(x, weights, bias)
        if self.why_unpacked is not None:
            return F.linear(x, weights, bias)
        return torch.ops.mkldnn._linear_pointwise(x, weights, bias, "none", [], "")

    @property
    def packed_version(self) -> str | None:
        return None if self._kernel is None else f"{layout_version()} shortens={self._kernel.shortens}"

    def to_packed(self, weights: Tensor | PackedMatrix) -> PackedTensors | None:
        return to_packed([weights]) if isinstance(weights, PackedMatrix) else None

    def from_packed(self, packed: PackedTensors) -> PackedMatrix:
        return from_packed(packed)[0]

    def native(self, weights: Tensor | PackedMatrix, num_slices: int) -> list[NativeLinear] | None:
        if self._kernel is None or not isinstance(weights, PackedMatrix):
            return None
        return self._kernel.slices(weights, num_slices)

    def lm_head(self, weights: Tensor | PackedMatrix, is_greedy: Tensor) -> Tensor | PackedMatrix | ScreenedMatrix:
        """With a screen, by which the kernel rules out outputs that cannot be the largest."""
        if self._kernel is None or not self._screens or not isinstance(weights, PackedMatrix):
            return weights
        return self._kernel.screened(weights, is_greedy) or weights

    def rows(self, weights: Tensor | PackedMatrix, indices: Tensor) -> Tensor:
        if isinstance(weights, PackedMatrix):
            assert self._kernel is not None
            return self._kernel.rows(weights, indices, weights.dtypes[0])
        return F.embedding(indices, weights)


def _why_not_native(context: QuantContext) -> str | None:
    """Why the native kernel does not compute the layers, as a predicate; None when it does."""
    if context.device.type != "cpu":
        return "is for CPUs"
    if context.dtype not in FloatKernel.formats:
        return f"does not compute in {str(context.dtype).removeprefix('torch.')}"
    return native.refusal()


def _why_unpacked(context: QuantContext) -> str | None:
    """Why weights stay as they are, in a few words; None when they are packed for oneDNN."""
    if context.device.type != "cpu":
        return "packing is for CPUs"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    operators = torch.ops.mkldnn
    if not hasattr(operators, "_linear_pointwise") or not hasattr(operators, "_reorder_linear_weight"):
        return f"torch {torch.__version__} does not have oneDNN's packing operators"
    if context.dtype == torch.float32:
        return None
    if context.dtype == torch.bfloat16:
        return None if operators._is_mkldnn_bf16_supported() else "this CPU has no bfloat16 kernels"
    if context.dtype == torch.float16:
        return None if operators._is_mkldnn_fp16_supported() else "this CPU has no float16 kernels"
    return f"oneDNN does not pack {context.dtype}"
