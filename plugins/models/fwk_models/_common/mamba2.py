"""Mamba-2's mixer (Dao and Gu 2024, arXiv:2405.21060): a state space whose decay is one number a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk_layers import ColumnParallelLinear, Part, RowParallelLinear, rank_rows
from fwk_models._common.recurrent import CausalConv, GatedNorm, RecurrentRows, new_state, state_space

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


@dataclass(frozen=True, slots=True)
class MixerSizes:
    """num_heads heads of head_size, groups of which share B and C of state_size."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    width: int  # of the convolution
    eps: float
    limits: tuple[float, float]  # of the time step
    bias: bool = False
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_size


def step_limits(value: Any) -> tuple[float, float]:
    """The config's limits of time steps; JSON has no infinity, so transformers writes {"__float__": "Infinity"}."""
    low, high = value or (0.0, float("inf"))
    found = [float(x["__float__"] if isinstance(x, dict) else x) for x in (low, high)]
    return found[0], found[1]


class Mamba2Mixer:
    """in_proj to z, x, B, C and the time steps; convolution; recurrence; gated norm; out_proj."""

    def __init__(self, context: ModelContext, prefix: str, sizes: MixerSizes) -> None:
        tp, heads, groups = context.tp, sizes.num_heads, sizes.num_groups
        if heads % tp.size or (groups % tp.size and groups != 1):
            raise ModelLoadError(
                f"{prefix}: {heads} heads in {groups} groups cannot be shared by {tp.size} ranks; choose a "
                "--tensor-parallel-size that divides both"
            )
        state = groups * sizes.state_size
        parts: Any = ((sizes.inner, heads), (state, groups), (state, groups))
        in_parts = ((sizes.inner, heads), *parts, (heads, heads))
        total = sum(size for size, _ in in_parts)
        hidden = context.config.hidden_size
        self.in_proj = ColumnParallelLinear(
            context, [Part(f"{prefix}.in_proj", total, segments=in_parts)], hidden, bias=sizes.bias
        )
        self.conv = CausalConv(context, f"{prefix}.conv1d", sizes.width, parts, bias=sizes.conv_bias)
        self.out_proj = RowParallelLinear(
            context, f"{prefix}.out_proj", sizes.inner, hidden, num_units=heads, bias=sizes.bias
        )
        of_heads = Part(prefix, heads, heads)
        self.rate, self.step_bias, self.skip = (
            rank_rows(context, f"{prefix}.{name}", (heads,), of_heads).float() for name in ("A_log", "dt_bias", "D")
        )
        self.rate = -self.rate.exp()
        self.norm = GatedNorm(context, f"{prefix}.norm.weight", sizes.inner, heads, groups, sizes.eps)
        self.sizes, self.num_heads, self.num_groups = sizes, heads // tp.size, max(1, groups // tp.size)
        self.state = new_state(context, self.conv, (self.num_heads, sizes.head_size, sizes.state_size))

    def __call__(self, hidden: Tensor, rows: RecurrentRows) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        heads, size, num_tokens = self.num_heads, self.sizes.head_size, hidden.shape[0]
        inner, states = heads * size, self.num_groups * self.sizes.state_size
        z, mixed, step = self.in_proj(hidden).split((inner, inner + 2 * states, heads), -1)
        mixed = self.conv(mixed, self.state.tensors["conv"], rows, silu=True)
        x, b, c = mixed.split((inner, states, states), -1)
        if self.conv.kernels is not None:
            weights = self.rate, self.step_bias, self.skip
            y = self.conv.kernels.state_space(
                (x, b, c, step), weights, self.sizes.limits, self.state.tensors["sum"], rows
            )
            return self.out_proj(self.norm(y, z))
        x, b, c = (part.float() for part in (x, b, c))
        x = x.view(num_tokens, heads, size)
        b, c = (part.view(num_tokens, self.num_groups, -1) for part in (b, c))
        steps = F.softplus(step.float() + self.step_bias).clamp(*self.sizes.limits)
        y = self._recur(x * steps.unsqueeze(-1), steps * self.rate, b, c, rows)
        y += x * self.skip[:, None]
        return self.out_proj(self.norm(y.view(num_tokens, inner), z))

    def _recur(self, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, rows: RecurrentRows) -> Tensor:
        """x: [num_tokens, heads, size]; log_decay: [num_tokens, heads]; b, c: [num_tokens, groups, state_size]."""
        out, state, repeats = torch.empty_like(x), self.state.tensors["sum"], self.num_heads // self.num_groups
        gathered = rows.gathered
        if len(gathered.singles):
            tokens = gathered.single_tokens
            bs, cs = (part.index_select(0, tokens).repeat_interleave(repeats, 1) for part in (b, c))
            sums = state.index_select(0, gathered.single_rows).float()
            sums *= log_decay.index_select(0, tokens).exp()[:, :, None, None]
            sums += x.index_select(0, tokens).unsqueeze(-1) * bs.unsqueeze(-2)
            out.index_copy_(0, tokens, (sums @ cs.unsqueeze(-1)).squeeze(-1))
            state.index_copy_(0, gathered.single_rows, sums.to(state.dtype))
        for row, start, end in gathered.spans:
            bs, cs = (part[start:end].transpose(0, 1).repeat_interleave(repeats, 0) for part in (b, c))
            y, sums = state_space(x[start:end].transpose(0, 1), log_decay[start:end].t(), bs, cs, state[row].float())
            out[start:end] = y.transpose(0, 1)
            state[row] = sums
        return out
