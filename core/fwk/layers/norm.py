"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class RMSNorm:
    """Normalises in float32, rounds, then scales: the rounding steps of ``transformers``."""

    def __init__(self, context: ModelContext, prefix: str, size: int, eps: float) -> None:
        self.weight = context.weights.tensor(f"{prefix}.weight", (size,)).to(context.device, context.dtype)
        self.eps = torch.tensor([eps], dtype=torch.float32, device=context.device)
        self.inverse_size = 1.0 / size

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size], unchanged, to its normalised copy."""
        x32 = x.float()
        # Five small kernels; F.rms_norm on a CPU launches twice as many.
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, norm, norm, value=self.inverse_size).rsqrt_()
        normed = x32.mul_(scale).to(x.dtype) if x32 is not x else x * scale
        return normed.mul_(self.weight)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream, in place, and normalise the sum: (normed, residual).

        Without a residual, ``x`` starts the stream.
        """
        residual = x if residual is None else residual.add_(x)
        return self(residual), residual
