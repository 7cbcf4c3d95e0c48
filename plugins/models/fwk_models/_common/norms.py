"""Norms of queries and keys beyond the one for each head (``fwk_layers.QKNorm``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk_layers import Part, RMSNorm
from fwk_layers.sharding import output_shard

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class HeadNorm:
    """``q_norm`` and ``k_norm`` below ``prefix``, or ``q_{name}``, ..., each head normalised by itself."""

    def __init__(
        self, context: ModelContext, prefix: str, norm: type[RMSNorm] = RMSNorm, *, name: str = "norm"
    ) -> None:
        size, eps = context.config.head_size, context.config.rms_norm_eps
        self.q, self.k = (norm(context, f"{prefix}.{part}_{name}", size, eps) for part in "qk")

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, heads, head_size] each, to the same."""
        return self.q(q), self.k(k)


class WholeNorm:
    """``q_norm`` and ``k_norm`` below ``prefix`` over all heads of a token at once, of all ranks together (OLMo 2)."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        config = context.config
        self.tp, self.eps, self.weights = context.tp, config.rms_norm_eps, []
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            full, size = f"{prefix}.{name}_norm.weight", heads * config.head_size
            whole = context.weights.tensor(full, (size,))
            mine = output_shard(Part(full, size, heads), context.tp).cut(whole, 0, 1, full)
            self.weights.append(mine.to(context.device, context.dtype).view(-1, config.head_size))

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, heads, head_size] each, to the same."""
        return self._norm(q, self.weights[0]), self._norm(k, self.weights[1])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        # Heads that several ranks hold are counted by each of them, in both sums.
        squares = self.tp.all_reduce(wide.square().sum((-1, -2)))
        mean = squares / (weight.numel() * self.tp.size)
        return (weight.float() * wide * (mean + self.eps).rsqrt()[:, None, None]).to(x.dtype)
