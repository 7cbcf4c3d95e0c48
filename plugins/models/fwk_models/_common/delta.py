"""A layer of the gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), as Qwen has it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk_layers import ColumnParallelLinear, Part, RowParallelLinear, rank_rows
from fwk_models._common.recurrent import CausalConv, RecurrentRows, delta_rule, new_state

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class DeltaSizes:
    """Heads and sizes, by the config's ``linear_*`` keys; a key head serves ``ratio`` value heads."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self.num_keys = config.integer("linear_num_key_heads", 16)
        self.num_values = config.integer("linear_num_value_heads", 32)
        self.key_size = config.integer("linear_key_head_dim", 128)
        self.value_size = config.integer("linear_value_head_dim", 128)
        self.width = config.integer("linear_conv_kernel_dim", 4, low=2)
        if self.num_values % self.num_keys or self.num_keys % context.tp.size:
            raise ModelLoadError(
                f"{self.num_keys} heads of keys and {self.num_values} of values cannot be shared by {context.tp.size} "
                "ranks; choose another --tensor-parallel-size"
            )
        self.ratio = self.num_values // self.num_keys
        self.keys, self.values = self.num_keys * self.key_size, self.num_values * self.value_size
        self.local_keys = self.num_keys // context.tp.size
        self.local_values = self.local_keys * self.ratio


class DeltaNet:
    """Projections, a convolution over q, k and v, the recurrence, a norm that z gates, and out_proj."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        sizes = self.sizes = DeltaSizes(context)
        hidden = context.config.hidden_size
        self.make_inputs(context, prefix, hidden)
        segments = ((sizes.keys, sizes.num_keys),) * 2 + ((sizes.values, sizes.num_keys),)
        self.conv = CausalConv(context, f"{prefix}.conv1d", sizes.width, segments, bias=False)
        of_heads = Part(prefix, sizes.num_values, sizes.num_keys)
        self.rate, self.step_bias = (
            rank_rows(context, f"{prefix}.{name}", (sizes.num_values,), of_heads).float()
            for name in ("A_log", "dt_bias")
        )
        self.rate = -self.rate.exp()
        self.eps = context.config.rms_norm_eps
        norm = context.weights.tensor(f"{prefix}.norm.weight", (sizes.value_size,))
        self.norm = norm.to(context.device, context.dtype)
        self.out_proj = RowParallelLinear(context, f"{prefix}.out_proj", sizes.values, hidden, num_units=sizes.num_keys)
        self.state = new_state(context, self.conv, (sizes.local_values, sizes.key_size, sizes.value_size))

    def make_inputs(self, context: ModelContext, prefix: str, hidden: int) -> None:
        """Build the layers of ``inputs``: here two matrices, each key head's rows one after another."""
        sizes = self.sizes
        size = 2 * sizes.keys + 2 * sizes.values
        self.qkvz = ColumnParallelLinear(context, [Part(f"{prefix}.in_proj_qkvz", size, sizes.num_keys)], hidden)
        self.ba = ColumnParallelLinear(
            context, [Part(f"{prefix}.in_proj_ba", 2 * sizes.num_values, sizes.num_keys)], hidden
        )
        # Places of q, k, v and z among each key head's outputs, in units that all of their sizes are multiples of.
        of_values = sizes.ratio * sizes.value_size
        unit = self.unit = math.gcd(sizes.key_size, of_values)
        places = torch.arange(sizes.local_keys * 2 * (sizes.key_size + of_values) // unit).view(sizes.local_keys, -1)
        counts = (sizes.key_size // unit,) * 2 + (of_values // unit,) * 2
        *mixed, z = (part.flatten() for part in places.split(counts, 1))
        self.mixed_index, self.z_index = torch.cat(mixed), z.contiguous()
        self.b_index, self.a_index = torch.arange(2 * sizes.local_keys).view(-1, 2).t().contiguous()

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side, z, beta's and the decay's inputs: [num_tokens, ...] each."""
        sizes, count = self.sizes, x.shape[0]
        of_values = sizes.ratio * sizes.value_size
        if self.conv.kernels is not None:
            qkvz, ba = self.qkvz(x), self.ba(x)
            mixed, z = (self.conv.kernels.columns(qkvz, index, self.unit) for index in (self.mixed_index, self.z_index))
            b, a = (self.conv.kernels.columns(ba, index, sizes.ratio) for index in (self.b_index, self.a_index))
            return mixed, z, b, a
        qkvz = self.qkvz(x).view(count, sizes.local_keys, -1)
        q, k, v, z = qkvz.split((sizes.key_size, sizes.key_size, of_values, of_values), -1)
        b, a = self.ba(x).view(count, sizes.local_keys, -1).split(sizes.ratio, -1)
        mixed = torch.cat([part.reshape(count, -1) for part in (q, k, v)], -1)
        return mixed, z.reshape(count, -1), b.reshape(count, -1), a.reshape(count, -1)

    def __call__(self, x: Tensor, rows: RecurrentRows) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        sizes, count = self.sizes, x.shape[0]
        mixed, z, b, a = self.inputs(x)
        mixed = self.conv(mixed, self.state.tensors["conv"], rows, silu=True)
        if self.conv.kernels is not None:
            state = self.state.tensors["sum"]
            o = self.conv.kernels.delta(mixed, a, b, self.rate, self.step_bias, state, rows)
            return self.out_proj(
                self.conv.kernels.gated_norm(o, z, self.norm, sizes.local_values, self.eps, gates_last=True)
            )
        mixed = mixed.float()
        keys = sizes.local_keys * sizes.key_size
        q, k, v = mixed.split((keys, keys, sizes.local_values * sizes.value_size), -1)
        q, k = (unit(part.view(count, sizes.local_keys, -1)).repeat_interleave(sizes.ratio, 1) for part in (q, k))
        v = v.view(count, sizes.local_values, -1)
        log_decay = self.rate * F.softplus(a.float() + self.step_bias)
        o = self._recur(q * sizes.key_size**-0.5, k, v, log_decay, b.float().sigmoid(), rows)
        # The norm rounds before the weight and the gate, head by head, as transformers does.
        normed = (o * (o.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)
        gated = (self.norm * normed).float() * F.silu(z.float()).view(o.shape)
        return self.out_proj(gated.to(x.dtype).view(count, -1))

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, rows: RecurrentRows) -> Tensor:
        """q, k, v: [num_tokens, heads, size] each; log_decay, beta: [num_tokens, heads]. Returns o like ``v``."""
        out, state = torch.empty_like(v), self.state.tensors["sum"]
        gathered = rows.gathered
        if len(gathered.singles):
            tokens = gathered.single_tokens
            qs, ks, vs = (part.index_select(0, tokens).unsqueeze(-2) for part in (q, k, v))
            sums = state.index_select(0, gathered.single_rows).float()
            sums *= log_decay.index_select(0, tokens).exp()[:, :, None, None]
            written = (vs - ks @ sums) * beta.index_select(0, tokens)[:, :, None, None]
            sums += ks.transpose(-1, -2) @ written
            out.index_copy_(0, tokens, (qs @ sums).squeeze(-2))
            state.index_copy_(0, gathered.single_rows, sums.to(state.dtype))
        for row, start, end in gathered.spans:
            qs, ks, vs = (part[start:end].transpose(0, 1) for part in (q, k, v))
            o, sums = delta_rule(qs, ks, vs, log_decay[start:end].t(), beta[start:end].t(), state[row].float())
            out[start:end] = o.transpose(0, 1)
            state[row] = sums
        return out


def unit(x: Tensor) -> Tensor:
    """Vectors of length one, along the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
