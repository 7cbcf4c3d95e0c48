"""Each operator written out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.operators import Operators
from fwk_layers import activation as activation_named

if TYPE_CHECKING:
    from torch import Tensor


class MineOperators(Operators):
    """No state, and nothing clever."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False) -> Tensor:
        x32 = x.float()
        normed = x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (normed * weight).to(x.dtype) if rounds_last else normed.to(x.dtype) * weight

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_last: bool = False
    ) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps, rounds_last=rounds_last)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        part = x[..., : cos.shape[-1]]
        swapped = part.roll(cos.shape[-1] // 2, -1)
        part.copy_((part * cos).float() + swapped.float() * sin.float())

    def gate(self, x: Tensor, activation: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation_named(activation)(gate) * up

    def rows(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        found = table[indices]
        return found if scale is None else found * scale
