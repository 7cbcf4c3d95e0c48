"""e4m3 weights, 16-bit or 32-bit activations: ``value = number * scale``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import ALL, PLAIN, LinearShape, ParamSpec, QuantMethod
from fwk_quant._common.layouts import activation_params, weights_arguments
from fwk_quant._common.product import multiply

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448.0
"""The largest number of e4m3 (the variant without infinities)."""

SIGN_AND_MAGNITUDE = 0x87F00000 - 2**32
"""As an int32: bit 31, and the seven bits from 20 on."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """numbers: [rows, columns] float8_e4m3fn; scales: [rows] float32."""

    numbers: Tensor
    scales: Tensor


class Fp8Method(QuantMethod):
    """A scale per output feature, or per matrix of the checkpoint."""

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        if shape.layout.startswith("compressed-tensors"):
            strategy = weights_arguments(self.context.checkpoint_config, shape.prefix).get("strategy")
            if strategy not in ("tensor", "channel"):
                raise ModelLoadError(
                    f"{shape.prefix}: scales per {strategy!r} are not read, only per tensor or channel"
                )
        found = {
            "weight": ParamSpec(0, 1, torch.float8_e4m3fn),
            "weight_scale": ParamSpec(0, 1, torch.float32, input_block=ALL, shards_input=False, is_uniform=True),
        }
        return found if shape.layout == PLAIN else {**found, **activation_params()}

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        weight = weight.float()
        sizes = weight.abs()
        is_per_channel = self.context.options.fp8_scale == "channel"
        largest = sizes.amax(1, keepdim=True) if is_per_channel else sizes.max().expand(weight.shape[0], 1)
        scales = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
        numbers = (weight / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scales}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Fp8Matrix:
        numbers, scales = loaded["weight"], loaded["weight_scale"].reshape(-1)
        if not bool(torch.isfinite(scales).all()) or bool(((numbers.view(torch.int8) & 127) == 127).any()):
            raise ModelLoadError(
                f"{shape.prefix}: its weights or scales are infinite or not numbers: fetch the file again"
            )
        return Fp8Matrix(numbers, scales)

    def apply(self, weights: Fp8Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        size = (weights.numbers.shape[0], weights.numbers.shape[1])
        return multiply(
            x, size, lambda start, stop: decode(weights.numbers[start:stop]).to(x.dtype), bias, weights.scales
        )


def decode(numbers: Tensor) -> Tensor:
    """e4m3 to float32, 15 times faster on a CPU than torch's conversion: sign, exponent and fraction are moved to their
    places in a float32, whose exponent then is too small by the difference of the two biases, 127 - 7.

    Not a number comes out as 480: ``finish`` refuses it.
    """
    bits = numbers.view(torch.int8).to(torch.int32)  # repeats the sign bit to the left
    return bits.bitwise_left_shift_(20).bitwise_and_(SIGN_AND_MAGNITUDE).view(torch.float32).mul_(2.0**120)
