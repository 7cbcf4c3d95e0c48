"""Layers that read a sequence from left to right and keep a state of it: convolutions, state spaces, delta rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from fwk_layers import Part, RecurrentState, rank_rows
from fwk_models._common.recurrent_cpu import MAX_WIDTH, RecurrentKernels

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch

CHUNK = 64
"""Tokens that are computed at once where a prompt is read: products of matrices inside, a recurrence between."""


class RecurrentRows:
    """A step's sequences as recurrent layers read them; the same for all layers of one kernel width."""

    def __init__(self, batch: ForwardBatch, width: int) -> None:
        """width: of the convolution's kernel."""
        assert batch.state_rows is not None
        self.rows, self.starts = batch.state_rows.rows, batch.query_start
        self._batch, self._width = batch, width

    @staticmethod
    def of(batch: ForwardBatch, width: int) -> RecurrentRows:
        """The rows of one step."""
        return RecurrentRows(batch, width)

    @cached_property
    def gathered(self) -> GatheredRows:
        """As torch's operators read them."""
        return GatheredRows.of(self._batch, self._width)


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Indices of a step's tokens.

    sources: [width, num_tokens] int64: for each token its predecessors and itself, as rows of all sequences' states
    (``width - 1`` rows each) followed by the step's tokens. last: [num_seqs * (width - 1)] rows of the states after it.
    singles: sequences of one token, computed together; spans: first and last + 1 token of the other ones.
    """

    sources: Tensor
    last: Tensor
    singles: Tensor  # [num_singles] int64: places in the batch
    single_tokens: Tensor  # [num_singles] int64: their tokens
    single_rows: Tensor  # [num_singles] int64: of ``RecurrentState``
    spans: list[tuple[int, int, int]]  # row of ``RecurrentState``, start, end

    @staticmethod
    def of(batch: ForwardBatch, width: int) -> GatheredRows:
        """The rows of one step. width: of the convolution's kernel."""
        assert batch.state_rows is not None
        device, rows_np = batch.token_ids.device, batch.state_rows.rows_np
        starts = batch.query_start_np.astype(np.int64)
        counts, past = np.diff(starts), width - 1
        num_seqs, offset = len(counts), len(counts) * past
        owners = np.repeat(np.arange(num_seqs), counts)
        local = np.arange(starts[-1]) - starts[owners]

        def row_of(owner: np.ndarray, place: np.ndarray) -> np.ndarray:
            """place: of a token in its sequence's step; below 0 it is one of the state's."""
            return np.where(place >= 0, offset + starts[owner] + place, owner * past + past + place)

        sources = np.stack([row_of(owners, local - past + k) for k in range(width)])
        each = np.repeat(np.arange(num_seqs), past)
        last = row_of(each, counts[each] - past + np.tile(np.arange(past), num_seqs))
        singles = np.flatnonzero(counts == 1)

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        return GatheredRows(
            tensor(sources),
            tensor(last),
            tensor(singles),
            tensor(starts[singles]),
            tensor(rows_np[singles].astype(np.int64)),
            [(int(rows_np[i]), int(starts[i]), int(starts[i + 1])) for i in np.flatnonzero(counts > 1)],
        )


class CausalConv:
    """A depthwise convolution over the tokens before: each channel by a kernel of its own.

    segments: sizes and units of the channels' parts, as those of ``Part``: each rank has its own channels of each.
    """

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        width: int,
        segments: Sequence[tuple[int, int | None]],
        *,
        bias: bool,
    ) -> None:
        channels = sum(size for size, _ in segments)
        part = Part(prefix, channels, segments=tuple(segments))
        kernel = rank_rows(context, f"{prefix}.weight", (channels, 1, width), part)
        self.kernel = kernel[:, 0].t().contiguous().to(context.dtype)  # [width, channels]
        self.bias = rank_rows(context, f"{prefix}.bias", (channels,), part).to(context.dtype) if bias else None
        self.width, self.channels = width, self.kernel.shape[1]
        self.kernels = RecurrentKernels.of(context) if width <= MAX_WIDTH else None

    @property
    def state_shape(self) -> tuple[int, int]:
        """The inputs of the last tokens."""
        return (self.width - 1, self.channels)

    def __call__(self, x: Tensor, state: Tensor, rows: RecurrentRows, *, silu: bool = False) -> Tensor:
        """[num_tokens, channels] to the same, then silu; ``state``: [num_rows, width - 1, channels]."""
        if self.kernels is not None:
            return self.kernels.conv(self, x, state, rows, silu=silu)
        out = self._convolved(x, state, rows)
        return F.silu(out) if silu else out

    def gated(self, before: Tensor, x: Tensor, after: Tensor, state: Tensor, rows: RecurrentRows) -> Tensor:
        """after * conv(before * x)."""
        if self.kernels is not None:
            return self.kernels.conv(self, x, state, rows, before=before, after=after)
        return after * self._convolved(before * x, state, rows)

    def _convolved(self, x: Tensor, state: Tensor, rows: RecurrentRows) -> Tensor:
        gathered = rows.gathered
        past = state.index_select(0, rows.rows).view(-1, self.channels)
        known = torch.cat((past.to(x.dtype), x))
        out = known.index_select(0, gathered.sources[0]) * self.kernel[0]
        for k in range(1, self.width):
            out.addcmul_(known.index_select(0, gathered.sources[k]), self.kernel[k])
        left = known.index_select(0, gathered.last).view(-1, *self.state_shape)
        state.index_copy_(0, rows.rows, left.to(state.dtype))
        return out if self.bias is None else out.add_(self.bias)


class GatedNorm:
    """Root-mean-square norm of groups of features, before or after they are gated by silu(z).

    num_groups: of all ranks. Ranks that share a group sum its squares together.
    """

    def __init__(
        self, context: ModelContext, name: str, size: int, num_units: int, num_groups: int, eps: float
    ) -> None:
        weight = rank_rows(context, name, (size,), Part(name, size, num_units))
        self.weight, self.eps, self.tp = weight.float(), eps, context.tp
        self.num_groups, self.is_shared = max(1, num_groups // context.tp.size), num_groups < context.tp.size
        self._kernels = None if self.is_shared else RecurrentKernels.of(context)

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        """[num_tokens, size of this rank] each, to the same, of ``z``'s type; the gate comes first."""
        if self._kernels is not None and x.dtype == torch.float32:
            return self._kernels.gated_norm(x, z, self.weight, self.num_groups, self.eps, gates_last=False)
        gated = (x.float() * F.silu(z.float())).view(x.shape[0], self.num_groups, -1)
        squares = gated.square().mean(-1, keepdim=True)
        if self.is_shared:
            squares = self.tp.all_reduce(squares) / self.tp.size
        return ((gated * (squares + self.eps).rsqrt()).view(x.shape[0], -1) * self.weight).to(z.dtype)


def new_state(context: ModelContext, conv: CausalConv, shape: tuple[int, ...] | None = None) -> RecurrentState:
    """A layer's state: the convolution's last inputs (``conv``), and with a shape what is summed up (``sum``)."""
    dtypes = {"conv": context.dtype, "sum": context.state_dtype or torch.float32}
    return RecurrentState(context, {"conv": conv.state_shape, **({"sum": shape} if shape else {})}, dtypes)


def decays(log_decay: Tensor) -> Tensor:
    """What is left of token j at token i: logarithms [heads, tokens] to [heads, tokens, tokens]; 0 where i < j."""
    total = log_decay.cumsum(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    return between.tril().exp().tril()


def state_space(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """h = exp(log_decay) h + x b^T; y = h c: Mamba-2's recurrence by chunks (arXiv:2405.21060, section 6).

    x: [heads, tokens, size], times its step; log_decay: [heads, tokens]; b, c: [heads, tokens, state_size];
    state: [heads, size, state_size]. All float32. Returns y like ``x``, and the state after the last token.
    """
    outputs: list[Tensor] = []
    for start in range(0, x.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        xs, bs, cs, logs = x[:, part], b[:, part], c[:, part], log_decay[:, part]
        total = logs.cumsum(-1)
        inside = (cs @ bs.transpose(1, 2)) * decays(logs)
        outputs.append(inside @ xs + total.exp().unsqueeze(-1) * (cs @ state.transpose(1, 2)))
        left = (total[:, -1:] - total).exp().unsqueeze(-1) * xs
        state = total[:, -1].exp()[:, None, None] * state + left.transpose(1, 2) @ bs
    return torch.cat(outputs, 1), state


def selective_scan(
    x: Tensor, steps: Tensor, rate: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """h = exp(steps * rate) h + x b^T; y = h c: Mamba's recurrence, token by token (arXiv:2312.00752, section 3).

    x: [tokens, channels], times its step; steps: [tokens, channels]; rate, state: [channels, state_size]; b, c:
    [tokens, state_size]. All float32. Returns y like ``x``, and the state after the last token.
    """
    outputs: list[Tensor] = []
    for start in range(0, x.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        decay = (steps[part].unsqueeze(-1) * rate).exp_()
        states = x[part].unsqueeze(-1) * b[part].unsqueeze(1)  # [tokens, channels, state_size]
        for left, written in zip(decay, states, strict=True):
            state = written.addcmul_(left, state)
        outputs.append((states @ c[part].unsqueeze(-1)).squeeze(-1))
    return torch.cat(outputs), state


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule by chunks (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, eq. 10 and sec. 3.2).

    S = exp(log_decay) S; S = S + k (beta (v - S^T k))^T; o = S^T q. q, k: [heads, tokens, key_size], of length one;
    v: [heads, tokens, value_size]; log_decay, beta: [heads, tokens]; state: [heads, key_size, value_size]. All float32.
    Returns o like ``v``, and the state after the last token.
    """
    outputs: list[Tensor] = []
    for start in range(0, q.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        qs, ks, vs, logs, betas = q[:, part], k[:, part], v[:, part], log_decay[:, part], beta[:, part].unsqueeze(-1)
        decay, total = decays(logs), logs.cumsum(-1).unsqueeze(-1)
        # Each token's correction of what earlier ones of the chunk have written is a triangular system (WY form).
        system = (betas * (ks @ ks.transpose(1, 2)) * decay).tril(-1)
        wanted = betas * (vs - total.exp() * (ks @ state))
        written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(total.exp() * (qs @ state) + ((qs @ ks.transpose(1, 2)) * decay) @ written)
        left = (total[:, -1:] - total).exp() * ks
        state = total[:, -1:].exp() * state + left.transpose(1, 2) @ written
    return torch.cat(outputs, 1), state
