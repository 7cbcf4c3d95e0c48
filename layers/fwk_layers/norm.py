"""Root-mean-square normalisation, and the older kind with a mean and a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class LayerNorm:
    """Subtracts the mean, divides by the deviation, scales and shifts (bias)."""

    def __init__(self, context: ModelContext, prefix: str, size: int, eps: float, *, bias: bool = True) -> None:
        weights, place = context.weights, (context.device, context.dtype)
        self.weight = weights.tensor(f"{prefix}.weight", (size,)).to(*place)
        self.bias = weights.tensor(f"{prefix}.bias", (size,)).to(*place) if bias else None
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size], unchanged, to its normalised copy."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class RMSNorm:
    """Normalises in float32, rounds, then scales: the rounding steps of ``transformers``."""

    rounds_last: ClassVar[bool] = False

    def __init__(self, context: ModelContext, prefix: str, size: int, eps: float) -> None:
        self.weight = context.weights.tensor(f"{prefix}.weight", (size,)).to(context.device, context.dtype)
        self.eps, self.operators = eps, context.operators
        self.group: int | None = None

    def feed(self, part: Any) -> None:
        """``add``'s outcome goes to ``part``: rounded, if its ``only_reader``, a linear layer, wants that."""
        reader = getattr(part, "only_reader", None)
        self.group = None if reader is None else reader.input_group

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size], unchanged, to its normalised copy."""
        return self.operators.rms_norm(x, self.weight, self.eps, rounds_last=self.rounds_last)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream, in place, and normalise the sum: (normed, residual).

        Without a residual, ``x`` starts the stream.
        """
        if self.group is not None:
            given = (x, residual, self.weight, self.eps, self.group)
            made = self.operators.add_rms_norm_rounded(*given, rounds_last=self.rounds_last)
            return cast("Tensor", made), x if residual is None else residual  # its reader takes both
        if residual is None:
            return self(x), x
        add_norm = self.operators.add_rms_norm
        return add_norm(x, residual, self.weight, self.eps, rounds_last=self.rounds_last), residual


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that scales by one plus its weight, in float32, and rounds last (Gemma)."""

    rounds_last: ClassVar[bool] = True

    def __init__(self, context: ModelContext, prefix: str, size: int, eps: float) -> None:
        super().__init__(context, prefix, size, eps)
        self.weight = 1.0 + self.weight.float()


class QKNorm:
    """``q_norm`` and ``k_norm`` below ``prefix``: every head of Q and K normalised by itself, all of them as one."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        num_heads: int,
        num_kv_heads: int,
        *,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        """Head counts are this rank's."""
        size, eps = context.config.head_size, context.config.rms_norm_eps
        self.norm = norm(context, f"{prefix}.q_norm", size, eps)
        of_keys = norm(context, f"{prefix}.k_norm", size, eps).weight
        self.norm.weight = torch.cat((self.norm.weight.expand(num_heads, -1), of_keys.expand(num_kv_heads, -1)))

    def __call__(self, qk: Tensor) -> Tensor:
        """[num_tokens, num_heads + num_kv_heads, head_size], unchanged, to its normalised copy."""
        return self.norm(qk)
