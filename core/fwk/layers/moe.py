"""Mixture of experts: routing, and experts sharded inside, each rank holding a part of every expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.moe import ExpertWeights, MoEContext
from fwk.layers.linear import ColumnParallelLinear, RowParallelLinear
from fwk.layers.sharding import Part, output_shard

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.interfaces.moe import ExpertLayer


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose their experts: softmax over all of them, then the best ``top_k``.

    normalises: the weights of a token's experts are made to sum to one.
    scale: factor on the weights.
    num_groups, top_groups: experts come only from the groups whose best expert is among the best (DeepSeek-V2).
    in_float32: whether the router multiplies in float32, whatever the model's dtype.
    is_sigmoid: scores are each expert's own sigmoid instead of a softmax over all.
    has_correction: ``gate.e_score_correction_bias`` is added to the scores that choose, not to those that weigh; a
        group is then as good as its best two experts (DeepSeek-V3).
    """

    num_experts: int
    top_k: int
    normalises: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    in_float32: bool = False
    is_sigmoid: bool = False
    has_correction: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ModelLoadError(f"each token cannot have {self.top_k} of {self.num_experts} experts")
        if not 1 <= self.top_groups <= self.num_groups or self.num_experts % self.num_groups:
            raise ModelLoadError(
                f"{self.num_experts} experts cannot be routed to {self.top_groups} of {self.num_groups} equal groups"
            )
        if self.has_correction and self.num_experts // self.num_groups < 2:
            raise ModelLoadError(f"{self.num_experts} experts in {self.num_groups} groups: a group needs two of them")
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ModelLoadError(
                f"each token cannot have {self.top_k} experts out of {self.top_groups} of {self.num_groups} groups"
            )

    def choose(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Router logits [num_tokens, num_experts] to expert ids and float32 weights, [num_tokens, top_k] each.

        correction: [num_experts] float32, where the routing has one.
        """
        scores = logits.float().sigmoid() if self.is_sigmoid else torch.softmax(logits, -1, dtype=torch.float32)
        ranks = scores if correction is None else scores + correction
        if self.top_groups < self.num_groups:
            groups = ranks.unflatten(-1, (self.num_groups, -1))
            worth = groups.amax(-1) if correction is None else groups.topk(2, -1).values.sum(-1)
            best = worth.topk(self.top_groups, -1).indices
            is_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
            ranks = groups.masked_fill(is_out.unsqueeze(-1), 0.0 if correction is None else -torch.inf).flatten(-2)
        ids = ranks.topk(self.top_k, -1).indices
        weights = scores.gather(-1, ids)
        if self.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if self.is_sigmoid else 0.0))
        return ids, weights * self.scale if self.scale != 1.0 else weights


class MoE:
    """Router ``gate`` (or the layer ``router``) and ``experts`` below ``prefix``, run by the chosen MoE runner.

    The checkpoint holds ``experts.N.{gate,up,down}_proj``, or other ``names`` of the three. The router stays plain: it
    is small, and decides. Neither it nor the experts, which see other tokens than the batch holds, can be changed by
    LoRA adapters.
    """

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        routing: Routing,
        *,
        intermediate_size: int,
        activation: str | None = None,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        router: str | None = None,
        has_bias: bool = False,
    ) -> None:
        """has_bias: of the router, and of each matrix of each expert."""
        config = context.config
        self.tp, self.routing = context.tp, routing
        shape = (routing.num_experts, config.hidden_size)
        dtype = torch.float32 if routing.in_float32 else context.dtype
        router = router or f"{prefix}.gate"
        self.router = context.weights.tensor(f"{router}.weight", shape).to(context.device, dtype)
        self.router_bias: Tensor | None = None
        if has_bias:
            self.router_bias = context.weights.tensor(f"{router}.bias", shape[:1]).to(context.device, dtype)
        self.correction: Tensor | None = None
        if routing.has_correction:
            bias = context.weights.tensor(f"{prefix}.gate.e_score_correction_bias", (routing.num_experts,))
            self.correction = bias.to(context.device, torch.float32)
        experts = _Experts(
            replace(context, lora=None), f"{prefix}.experts", routing.num_experts, intermediate_size, names, has_bias
        )
        self.runner = context.moe_runner(
            MoEContext(
                num_experts=routing.num_experts,
                top_k=routing.top_k,
                hidden_size=config.hidden_size,
                intermediate_size=experts.shard.part_of(intermediate_size),
                activation=activation or config.raw.get("hidden_act") or "silu",
                dtype=context.dtype,
                device=context.device,
            )
        )
        self.runner.load(experts)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size], unchanged, to the same shape; the same on all ranks."""
        logits = F.linear(x.to(self.router.dtype), self.router, self.router_bias)
        expert_ids, weights = self.routing.choose(logits, self.correction)
        return self.tp.all_reduce(self.runner.apply(x, expert_ids, weights))


class _Experts(ExpertWeights):
    """Reads the experts of one layer: this rank's columns of gate and up, and the same rows' share of down."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        num_experts: int,
        intermediate_size: int,
        names: tuple[str, str, str],
        has_bias: bool,
    ) -> None:
        self._has_bias = has_bias
        self._names = names
        self._context = context
        self._prefix = prefix
        self._num_experts = num_experts
        self._inner = intermediate_size
        self.shard = output_shard(Part(prefix, intermediate_size), context.tp)

    def layers(self, expert: int) -> tuple[ExpertLayer, ExpertLayer]:
        prefix, hidden = f"{self._prefix}.{expert}", self._context.config.hidden_size
        parts = [Part(f"{prefix}.{name}", self._inner) for name in self._names[:2]]
        gate_up = ColumnParallelLinear(self._context, parts, hidden, bias=self._has_bias)
        name = f"{prefix}.{self._names[2]}"
        down = RowParallelLinear(self._context, name, self._inner, hidden, bias=self._has_bias, reduces=False)
        return gate_up, down

    def stacked(self) -> tuple[Tensor, Tensor]:
        context = self._context
        if self._has_bias:
            raise ModelLoadError(f"{self._prefix}: this MoE runner computes without the experts' biases")
        gate_up, down = [], []
        for expert in range(self._num_experts):
            for name in self._names:
                if context.quant.choose(f"{self._prefix}.{expert}.{name}").method is not context.plain:
                    raise ModelLoadError(f"{self._prefix}: this MoE runner computes with plain weights only")
            pieces = [self._read(expert, name, 0) for name in self._names[:2]]
            gate_up.append(torch.cat(pieces))
            down.append(self._read(expert, self._names[2], 1))
        return torch.stack(gate_up).to(context.device), torch.stack(down).to(context.device)

    def _read(self, expert: int, name: str, sharded_dim: int) -> Tensor:
        full = f"{self._prefix}.{expert}.{name}.weight"
        hidden = self._context.config.hidden_size
        shape = (hidden, self._inner) if sharded_dim else (self._inner, hidden)
        return self.shard.cut(self._context.weights.tensor(full, shape), sharded_dim, 1, full).to(self._context.dtype)
