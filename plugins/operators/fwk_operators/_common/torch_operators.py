"""Each operator in a few calls of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.interfaces.operators import OperatorContext, Operators
from fwk_layers import activation as activation_named


class TorchOperators(Operators):
    """The reference."""

    def __init__(self, context: OperatorContext) -> None:
        super().__init__(context)
        self._eps: dict[float, Tensor] = {}  # as tensors, which one kernel adds to a product

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False) -> Tensor:
        x32 = x.float()
        # Five small kernels; F.rms_norm on a CPU launches twice as many.
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        if eps not in self._eps:
            self._eps[eps] = torch.full((1,), eps, device=x.device)  # made there: the host does not wait
        scale = torch.addcmul(self._eps[eps], norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        normed = x32.mul_(scale) if x32 is not x else x * scale
        return normed.mul_(weight).to(x.dtype) if rounds_last else normed.to(x.dtype).mul_(weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False
    ) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps, rounds_last=rounds_last)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        size = cos.shape[-1]
        part = x if size == x.shape[-1] else x[..., :size]
        swapped = torch.roll(part, size // 2, -1)
        part.mul_(cos).addcmul_(swapped, sin)

    def gate(self, x: Tensor, activation: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation_named(activation)(gate).mul_(up)

    def rows(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        found = F.embedding(indices, table) if table.dim() == 2 else table.index_select(0, indices)
        return found if scale is None else found.mul_(scale)
