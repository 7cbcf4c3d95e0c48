"""What the integer quantisers share: their layouts, and quantising while loading."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import ALL, PLAIN, LinearShape, ParamSpec, QuantMethod
from fwk_quant._common.integers import IntegerMatrix, pack, quantise
from fwk_quant._common.layouts import params, unpack

if TYPE_CHECKING:
    from torch import Tensor


class IntegerMethod(QuantMethod):
    """Weights of ``bits`` bits; activations are not quantised."""

    bits: ClassVar[int]

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Inputs that share a scale when weights are quantised while loading; ``ALL``: all of them."""

    @property
    def has_zeros(self) -> bool:
        """Whether groups then have zero points of their own."""
        return False

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        if shape.layout != PLAIN:
            return params(shape.layout, self.bits, shape, self.context.checkpoint_config)
        group = self.group_size
        scales = ParamSpec(0, 1, shape.dtype, input_block=group, shards_input=group != ALL)
        found = {"numbers": ParamSpec(0, 1, torch.int8), "scales": scales}
        return {**found, "zeros": replace(scales, dtype=torch.uint8)} if self.has_zeros else found

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        size = weight.shape[1] if self.group_size == ALL else self.group_size
        if weight.shape[1] % size:
            raise ModelLoadError(
                f"{prefix}: groups of {size} do not divide its {weight.shape[1]} inputs; choose a smaller group size, "
                "or leave the layer out with --quantization-exclude"
            )
        # Scales are rounded to the type they are kept in before numbers are, so that one makes up for the other.
        weight = weight.to(self.context.dtype)
        return quantise(weight, self.bits, size, has_zeros=self.has_zeros)

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> list[IntegerMatrix]:
        if shape.layout == PLAIN:
            packed = pack(loaded["numbers"], self.bits)
            return [IntegerMatrix(self.bits, packed, loaded["scales"], loaded.get("zeros"))]
        return unpack(shape.layout, self.bits, loaded, shape, self.context.checkpoint_config)

    def apply(self, weights: list[IntegerMatrix], x: Tensor, bias: Tensor | None) -> Tensor:
        if len(weights) == 1:
            return weights[0].apply(x, bias)
        y = torch.cat([matrix.apply(x, None) for matrix in weights], -1)
        return y if bias is None else y.add_(bias)
