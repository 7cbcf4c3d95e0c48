"""Layers whose weights are torchao's tensors: ``torch.nn.functional.linear`` finds that package's kernels for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import LinearShape, ParamSpec, QuantMethod
from fwk_quant._common.int8_product import multiply_int8, saturates
from torchao.quantization import (  # pyright: ignore[reportMissingImports] - selected only where it is installed
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    quantize_,
)

if TYPE_CHECKING:
    from torch import Tensor

RECIPES: dict[str, tuple[Any, torch.dtype]] = {
    "int8wo": (Int8WeightOnlyConfig, torch.int8),
    "int8dq": (Int8DynamicActivationInt8WeightConfig, torch.int8),
    "fp8wo": (Float8WeightOnlyConfig, torch.float8_e4m3fn),
}


class TorchaoMethod(QuantMethod):
    """Weights are rounded whole, so that ranks compute with the same numbers, and then cut."""

    @property
    def _recipe(self) -> tuple[Any, torch.dtype]:
        return RECIPES[self.context.options.torchao_config]

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        return {
            "qdata": ParamSpec(0, 1, self._recipe[1]),
            "scale": ParamSpec(0, None, torch.float32),
        }

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        made = self._rounded(weight.to(self.context.dtype))
        return {"qdata": made.qdata, "scale": made.scale.view(-1)}

    @property
    def encodes_from(self) -> torch.dtype | None:
        return self.context.dtype

    def _rounded(self, weight: Tensor) -> Any:
        """weight: [out_features, in_features] to torchao's tensor of it."""
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        try:
            quantize_(layer, self._recipe[0]())
        except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            name = self.context.options.torchao_config
            raise ModelLoadError(f"--torchao-config {name}: torchao refuses it here: {error}") from None
        return layer.weight.data

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Any:
        numbers = loaded["qdata"].contiguous()
        # What else torchao keeps with a matrix follows from its recipe and size.
        made = self._rounded(torch.zeros(numbers.shape, dtype=self.context.dtype, device=numbers.device))
        made.qdata, made.scale = numbers, loaded["scale"].contiguous().view(-1, 1)
        return made

    def apply(self, weights: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if not len(x):
            return x.new_empty(0, weights.shape[0])
        if x.device.type == "cpu" and self._recipe[0] is Int8DynamicActivationInt8WeightConfig and saturates():
            return _rounded_linear(x, weights, bias)
        return F.linear(x, weights, bias)


def _rounded_linear(x: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
    """What torchao computes of int8 weights and activations, with an exact product.

    x: [num_tokens, in_features] to [num_tokens, out_features].
    """
    rounded = Int8Tensor.from_hp(x, weights.act_quant_kwargs.granularity)
    sums = multiply_int8(rounded.qdata, weights.qdata).to(rounded.scale.dtype)
    y = sums.mul_(rounded.scale.view(-1, 1)).to(x.dtype) * weights.scale.view(-1)
    return (y if bias is None else y.add_(bias)).to(x.dtype)
