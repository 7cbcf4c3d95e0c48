"""Layers in the formats of bitsandbytes, computed by its functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import bitsandbytes  # pyright: ignore[reportMissingImports] - selected only where it is installed
from bitsandbytes import functional  # pyright: ignore[reportMissingImports]
from fwk.errors import ModelLoadError
from fwk.interfaces.loader import WeightSource
from fwk.interfaces.quant import PLAIN, LinearShape, ParamSpec, QuantMethod
from fwk_quant._common.int8_product import multiply_int8, saturates
from fwk_quant.bitsandbytes.stored import BLOCK, four_bit, int8

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 127.0


@dataclass(frozen=True, slots=True)
class FourBit:
    """A matrix of NF4 or FP4: packed [numbers / 2, 1] uint8, and the package's description of it."""

    packed: Tensor
    state: Any


@dataclass(frozen=True, slots=True)
class Int8:
    """A matrix of LLM.int8(): numbers [out_features, in_features] int8; scales [out_features] float32, times 127."""

    numbers: Tensor
    scales: Tensor


class BitsandbytesMethod(QuantMethod):
    """NF4 and FP4 are unpacked for each product. LLM.int8() rounds a token's activations, too, but for the largest."""

    def _kind(self, layout: str) -> str:
        return self.context.options.bitsandbytes_type if layout == PLAIN else layout.partition(":")[2]

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        if self._kind(shape.layout) == "int8":
            return {"weight": ParamSpec(0, 1, torch.int8), "SCB": ParamSpec(0, None, torch.float32)}
        return {
            "weight": ParamSpec(0, 1, torch.uint8, input_block=2),
            "absmax": ParamSpec(0, 1, torch.float32, input_block=BLOCK),
        }

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        kind = self._kind(PLAIN)
        if kind == "int8":
            numbers, scales, _ = functional.int8_vectorwise_quant(weight.half().contiguous())
            return {"weight": numbers, "SCB": scales}
        rows, columns = weight.shape
        if columns % BLOCK:
            raise ModelLoadError(
                f"{prefix}: bitsandbytes keeps a scale for each {BLOCK} numbers, and {columns} inputs are no whole "
                f"number of these: leave the layer out (--quantization-exclude {prefix!r})"
            )
        packed, state = functional.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type=kind)
        return {"weight": packed.view(rows, columns // 2), "absmax": state.absmax.view(rows, columns // BLOCK)}

    def read(
        self, weights: WeightSource, prefix: str, layout: str, size: tuple[int, int]
    ) -> Mapping[str, Tensor] | None:
        kind = self._kind(layout)
        return int8(weights, prefix, size) if kind == "int8" else four_bit(weights, prefix, kind, size)

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> FourBit | Int8:
        kind = self._kind(shape.layout)
        if kind == "int8":
            return Int8(loaded["weight"].contiguous(), loaded["SCB"].contiguous())
        size = torch.Size((sum(shape.out_features), shape.in_features))
        state = functional.QuantState(
            absmax=loaded["absmax"].contiguous().view(-1),
            shape=size,
            code=functional.get_4bit_type(kind, device=shape.device, blocksize=BLOCK),
            blocksize=BLOCK,
            quant_type=kind,
            dtype=shape.dtype,
        )
        return FourBit(loaded["weight"].contiguous().view(-1, 1), state)

    def apply(self, weights: FourBit | Int8, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(weights, Int8):
            y = self._multiply(weights, x).to(x.dtype)
            return y if bias is None else y.add_(bias)
        return bitsandbytes.matmul_4bit(x.contiguous(), weights.packed, weights.state, bias=bias)  # pyright: ignore[reportPrivateImportUsage]

    def _multiply(self, weights: Int8, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] to [num_tokens, out_features] float32.

        What is kept out are a token's own outliers, so that no other token of the step changes its numbers. The package
        keeps out the columns in which any token of the step has one.
        """
        if not len(x):
            return x.new_empty(0, len(weights.numbers), dtype=torch.float32)
        rounded, extra, threshold = x.half(), None, self.context.options.bitsandbytes_threshold
        if threshold:
            is_large = rounded.abs() >= threshold
            columns = is_large.any(0).nonzero().view(-1)
            if len(columns):
                large = rounded[:, columns].masked_fill(~is_large[:, columns], 0)
                scaled = weights.numbers[:, columns].float() * (weights.scales / LARGEST).unsqueeze(1)
                extra = F.linear(large.float(), scaled)
                rounded = rounded.masked_fill(is_large, 0)
        numbers, scales, _ = functional.int8_vectorwise_quant(rounded.contiguous())
        inexact = x.device.type == "cpu" and saturates()
        sums = (multiply_int8 if inexact else functional.int8_linear_matmul)(numbers, weights.numbers)
        y = sums.float().mul_(weights.scales / LARGEST).mul_((scales / LARGEST).unsqueeze(1))
        return y if extra is None else y.add_(extra)
