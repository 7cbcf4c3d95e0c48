"""Mamba's mixer (Gu and Dao 2023, arXiv:2312.00752): a state space whose decay is a number a channel and state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk_layers import ColumnParallelLinear, Part, RowParallelLinear, activation, rank_rows
from fwk_models._common.recurrent import CausalConv, RecurrentRows, new_state, selective_scan

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ModelConfig

Norm = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """``inner`` channels with ``state_size`` numbers each; time steps come from ``rank`` features."""

    inner: int
    state_size: int
    rank: int
    width: int  # of the convolution
    bias: bool = False
    conv_bias: bool = True


def step_rank(config: ModelConfig, name: str) -> int:
    """Features the time steps are made of; ``auto`` or nothing: a sixteenth of the hidden size."""
    return -(-config.hidden_size // 16) if config.raw.get(name, "auto") in (None, "auto") else config.integer(name)


class MambaMixer:
    """in_proj to x and z; convolution; x_proj to the time steps, B and C; recurrence; gate; out_proj.

    Ranks have channels of their own, and sum up what ``x_proj`` makes of them. norms: of the time steps' features, of B
    and of C.
    """

    def __init__(
        self, context: ModelContext, prefix: str, sizes: MambaSizes, norms: tuple[Norm, Norm, Norm] | None = None
    ) -> None:
        inner, state, tp = sizes.inner, sizes.state_size, context.tp
        if inner % tp.size:
            raise ModelLoadError(
                f"{prefix}: {inner} channels cannot be shared by {tp.size} ranks; choose a --tensor-parallel-size that "
                f"divides {inner}"
            )
        hidden, halves = context.config.hidden_size, ((inner, None), (inner, None))
        part = Part(f"{prefix}.in_proj", 2 * inner, segments=halves)
        self.in_proj = ColumnParallelLinear(context, [part], hidden, bias=sizes.bias)
        self.conv = CausalConv(context, f"{prefix}.conv1d", sizes.width, halves[:1], bias=sizes.conv_bias)
        self.x_proj = RowParallelLinear(context, f"{prefix}.x_proj", inner, sizes.rank + 2 * state)
        step_part = Part(f"{prefix}.dt_proj", inner)
        self.dt_proj = ColumnParallelLinear(context, [step_part], sizes.rank, bias=True)
        self.out_proj = RowParallelLinear(context, f"{prefix}.out_proj", inner, hidden, bias=sizes.bias)
        channels = Part(prefix, inner)
        self.rate = -rank_rows(context, f"{prefix}.A_log", (inner, state), channels).float().exp()
        self.skip = rank_rows(context, f"{prefix}.D", (inner,), channels).float()
        act = str(context.config.raw.get("hidden_act") or "silu")
        self.activation, self.has_silu = activation(act), act in ("silu", "swish")
        self.sizes, self.norms = sizes, norms
        self.state = new_state(context, self.conv, tuple(self.rate.shape))

    def __call__(self, hidden: Tensor, rows: RecurrentRows) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        x, z = self.in_proj(hidden).chunk(2, -1)
        x = self._convolved(x, rows)
        parts: Any = self.x_proj(x).split((self.sizes.rank, self.sizes.state_size, self.sizes.state_size), -1)
        if self.norms is not None:
            parts = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        kernels = self.conv.kernels
        steps = self.dt_proj(parts[0] if kernels is not None else parts[0].contiguous())
        if kernels is not None:
            both = (x, steps, parts[1], parts[2], z)
            y = kernels.selective(both, self.rate, self.skip, self.state.tensors["sum"], rows)
            return self.out_proj(y)
        steps = F.softplus(steps.float())
        x = x.float()
        y = self._recur(x * steps, steps, parts[1].float(), parts[2].float(), rows)
        y += x * self.skip
        return self.out_proj((y * F.silu(z.float())).to(hidden.dtype))

    def _convolved(self, x: Tensor, rows: RecurrentRows) -> Tensor:
        state = self.state.tensors["conv"]
        if self.has_silu:
            return self.conv(x, state, rows, silu=True)
        return self.activation(self.conv(x, state, rows))

    def _recur(self, x: Tensor, steps: Tensor, b: Tensor, c: Tensor, rows: RecurrentRows) -> Tensor:
        """x, steps: [num_tokens, channels]; b, c: [num_tokens, state_size]."""
        out, state = torch.empty_like(x), self.state.tensors["sum"]
        gathered = rows.gathered
        if len(gathered.singles):
            xs, times, bs, cs = (part.index_select(0, gathered.single_tokens) for part in (x, steps, b, c))
            sums = state.index_select(0, gathered.single_rows).float()
            sums *= (times.unsqueeze(-1) * self.rate).exp_()
            sums += xs.unsqueeze(-1) * bs.unsqueeze(1)
            out.index_copy_(0, gathered.single_tokens, (sums @ cs.unsqueeze(-1)).squeeze(-1))
            state.index_copy_(0, gathered.single_rows, sums.to(state.dtype))
        for row, start, end in gathered.spans:
            part = slice(start, end)
            y, sums = selective_scan(x[part], steps[part], self.rate, b[part], c[part], state[row].float())
            out[part] = y
            state[row] = sums
        return out
