"""Eight bits a weight, with one scale for each output feature; weights are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.interfaces.quant import LinearShape, ParamSpec, QuantMethod

if TYPE_CHECKING:
    from torch import Tensor


class MineQuant(QuantMethod):
    """``round(weight / scale)`` with the scale that makes a row's largest weight 127."""

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(0, 1, torch.int8), "scale": ParamSpec(0, None, torch.float32)}

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
        return {"weight": (weight.float() / scale[:, None]).round().to(torch.int8), "scale": scale}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> tuple[Tensor, Tensor]:
        return loaded["weight"], loaded["scale"]

    def apply(self, weights: tuple[Tensor, Tensor], x: Tensor, bias: Tensor | None) -> Tensor:
        weight, scale = weights
        out = F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)
        return out if bias is None else out + bias
