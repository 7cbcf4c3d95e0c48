"""Unquantised linear layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.interfaces.quant import LinearShape, ParamSpec, QuantContext, QuantMethod

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

PACKED_FOR_TOKENS = 512
"""Batch size told to oneDNN when it picks a layout. Measured with 1, 8, 32, 128 and 512 tokens a step: in bfloat16
all hints do equally well, in float32 a small one costs 8 tokens or more up to 1.8 times as much."""


class PlainMethod(QuantMethod):
    """``x @ weight.T``, where possible by oneDNN on weights packed beforehand (30 to 45% faster), else by torch."""

    def __init__(self, context: QuantContext) -> None:
        super().__init__(context)
        self.why_unpacked = _why_unpacked(context)
        if self.why_unpacked is not None and context.device.type == "cpu":
            logger.warning("linear layers run on unpacked weights, more slowly: %s", self.why_unpacked)

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(output_dim=0, input_dim=1, dtype=shape.dtype)}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Tensor:
        """The weight in the kernel's layout; what was loaded is not kept."""
        weight = loaded["weight"]
        if self.why_unpacked is not None:
            return weight
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_TOKENS)

    def apply(self, weights: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.why_unpacked is not None:
            return F.linear(x, weights, bias)
        return torch.ops.mkldnn._linear_pointwise(x, weights, bias, "none", [], "")


def _why_unpacked(context: QuantContext) -> str | None:
    """Why weights stay as they are, in a few words; None when they are packed."""
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
