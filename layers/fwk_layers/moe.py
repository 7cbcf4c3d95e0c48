"""Mixture of experts: routing, and experts that ranks share: a part of every expert each, or whole ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.moe import ExpertWeights, MoEContext, MoERunner, Routing
from fwk.interfaces.parallel import SingleRank
from fwk.interfaces.weights_cache import NO_WEIGHTS_CACHE
from fwk_layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from fwk_layers.placed_experts import PlacedExperts
from fwk_layers.sharding import Part, Shard, output_shard

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.interfaces.moe import ExpertLayer
    from fwk.interfaces.native import NativeLinear
    from fwk.interfaces.quant import PackedNumbers


class MoE:
    """Router ``gate`` (or the layer ``router``) and ``experts`` below ``prefix``, run by the chosen MoE runner.

    The checkpoint holds ``experts.N.{gate,up,down}_proj``, or other ``names`` of the three. The router stays plain: it
    is small, and decides. Neither it nor the experts, which see other tokens than the batch holds, can be changed by
    LoRA adapters.

    With ``ModelContext.ep_size`` ep, group r of ep equal groups of ranks holds experts [r * E / ep, (r + 1) * E / ep),
    or those that ``expert_placement`` says, and each rank of a group a part of each. Every rank routes all tokens; one
    sum over all ranks joins the experts.
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
        self.tp, self.routing, self.operators = context.tp, routing, context.operators
        self.router = _router(context, router or f"{prefix}.gate", routing, has_bias)
        self.correction: Tensor | None = None
        if routing.has_correction:
            bias = context.weights.tensor(f"{prefix}.gate.e_score_correction_bias", (routing.num_experts,))
            self.correction = bias.to(context.device, torch.float32)
        name, placement = f"{prefix}.experts", context.expert_placement
        shape = None if placement is None else placement.shape(name, routing)
        slots: Sequence[int] = range(routing.num_experts)
        if placement is not None and shape is not None:
            slots = placement.slots(name, shape)
        groups = _ExpertGroups(context, name, routing.num_experts, slots)
        groups.skip_others(context)
        inner = replace(context, lora=None, tp=groups.own)
        experts = _Experts(inner, name, groups.experts, intermediate_size, names, has_bias)
        build = partial(
            context.moe_runner,
            MoEContext(
                num_experts=len(groups.experts),
                top_k=routing.top_k,
                hidden_size=config.hidden_size,
                intermediate_size=experts.shard.part_of(intermediate_size),
                activation=activation or config.raw.get("hidden_act") or "silu",
                dtype=context.dtype,
                device=context.device,
                ep_size=context.ep_size,
            ),
        )
        self.runner: MoERunner
        try:
            if placement is None or shape is None:
                runner = build()
                self.runner = _OwnExperts(runner, groups.experts[0]) if groups.experts[0] else runner
                self.runner.load(experts)
            else:
                self.runner = PlacedExperts(name, build, placement, shape, slots, groups.index, context.device)
                self.runner.read(experts)
                placement.add(self.runner)
        except ModelLoadError as error:
            experts.check_layout(str(error))
            raise

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size], unchanged, to the same shape; the same on all ranks."""
        expert_ids, weights = self.operators.choose_experts(self.router(x), self.routing, self.correction)
        return self.tp.all_reduce(self.runner.apply(x, expert_ids, weights))


def _router(context: ModelContext, prefix: str, routing: Routing, has_bias: bool) -> Callable[[Tensor], Tensor]:
    wide = context.plain_float32 if routing.in_float32 else None
    plain = replace(context, lora=None, dtype=context.dtype if wide is None else torch.float32)
    size, method = context.config.hidden_size, wide or context.plain
    router = ReplicatedLinear(plain, prefix, size, routing.num_experts, bias=has_bias, method=method)
    return router if wide is None else lambda x: router(x.float())


class _ExpertGroups:
    """Which of a layer's experts this rank holds, and with which other ranks it shares each of them."""

    def __init__(self, context: ModelContext, prefix: str, num_experts: int, slots: Sequence[int]) -> None:
        """slots: the expert in each slot of all groups."""
        tp, ep_size = context.tp, context.ep_size
        if len(slots) % ep_size:
            raise ModelLoadError(
                f"{prefix}: {num_experts} experts do not divide by {ep_size}; choose an --expert-parallel-size that "
                f"divides {num_experts}"
            )
        size = tp.size // ep_size
        self.prefix, self.num_experts = prefix, num_experts
        self.index = tp.rank // size
        own = Shard(self.index, ep_size).range(len(slots))
        self.experts = slots[own.start : own.stop]
        self.own = _ExpertGroup(tp.rank % size, size)

    def skip_others(self, context: ModelContext) -> None:
        """Say that the other groups' experts are left out, where the checkpoint has them one by one."""
        others = {str(number) for number in range(self.num_experts) if number not in self.experts}
        start = f"{self.prefix}."
        for name in context.weights.names() if others else ():
            if name.startswith(start) and name.removeprefix(start).partition(".")[0] in others:
                context.weights.skip(name)


class _ExpertGroup(SingleRank):
    """The ranks that share the same experts. It only says which part is whose: the layer sums over all ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class _OwnExperts(MoERunner):
    """A runner whose first expert is not the router's first."""

    def __init__(self, runner: MoERunner, first: int) -> None:
        super().__init__(runner.context)
        self._runner, self._first = runner, first

    def load(self, experts: ExpertWeights) -> None:
        self._runner.load(experts)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return self._runner.apply(x, expert_ids - self._first, weights)


class _Experts(ExpertWeights):
    """Reads a rank's experts of one layer: its columns of gate and up, and the same rows' share of down.

    numbers: in the checkpoint, of those that a runner calls 0, 1, ...; one may stand there several times.
    """

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        numbers: Sequence[int],
        intermediate_size: int,
        names: tuple[str, str, str],
        has_bias: bool,
    ) -> None:
        self._has_bias = has_bias
        self._names = names
        self._context = context
        self._prefix = prefix
        self._numbers = numbers
        self._inner = intermediate_size
        self.shard = output_shard(Part(prefix, intermediate_size), context.tp)
        self._living: WeakValueDictionary[tuple[int, bool], ColumnParallelLinear | RowParallelLinear]
        self._living = WeakValueDictionary()  # by expert, and whether it is down

    def of(self, numbers: Sequence[int]) -> _Experts:
        """``MovableWeights.of``."""
        other = copy(self)
        other._numbers = numbers
        return other

    def built(self) -> None:
        """``MovableWeights.built``: by then the cache of packed weights is closed."""
        self._context = replace(self._context, weights_cache=NO_WEIGHTS_CACHE)

    def check_layout(self, error: str) -> None:
        """Raise a clearer error than one of the first expert's weight when no expert's tensors go by such names."""
        if f"'{self._prefix}.{self._numbers[0]}.{self._names[0]}." not in error:
            return
        stored = [name for name in self._context.weights.names() if name.startswith(f"{self._prefix}.")]
        expected = [f"{self._prefix}.{number}.{name}." for number in self._numbers for name in self._names]
        if stored and not any(name.startswith(tuple(expected)) for name in stored):
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name.removeprefix(self._prefix)) for name in stored)
            wanted = ", ".join(f"N.{name}" for name in self._names)
            found = ", ".join(kind.lstrip(".") for kind in kinds)
            raise ModelLoadError(
                f"{self._prefix}: the experts are stored as {found}, and this model reads {wanted}: "
                "convert the checkpoint to the layout its makers publish"
            )

    def layers(self, expert: int) -> tuple[ExpertLayer, ExpertLayer]:
        number = self._numbers[expert]
        living = self._living.get((number, False)), self._living.get((number, True))
        if living[0] is not None and living[1] is not None:
            return living[0], living[1]
        prefix, hidden = f"{self._prefix}.{number}", self._context.config.hidden_size
        parts = [Part(f"{prefix}.{name}", self._inner) for name in self._names[:2]]
        gate_up = ColumnParallelLinear(self._context, parts, hidden, bias=self._has_bias)
        name = f"{prefix}.{self._names[2]}"
        down = RowParallelLinear(self._context, name, self._inner, hidden, bias=self._has_bias, reduces=False)
        self._living[number, False], self._living[number, True] = gate_up, down
        return gate_up, down

    def native(self, layer: ExpertLayer, num_slices: int) -> list[NativeLinear] | None:
        assert isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        return layer.native(num_slices)

    @property
    def is_plain(self) -> bool:
        choose, prefix = self._context.quant.choose, self._prefix
        names = (f"{prefix}.{number}.{name}" for number in self._numbers for name in self._names)
        return all(choose(name).method is self._context.plain for name in names)

    def packed(self, expert: int) -> tuple[PackedNumbers, PackedNumbers]:
        self._refuse_bias()
        gate_up, down = self.layers(expert)
        assert isinstance(gate_up, ColumnParallelLinear)
        assert isinstance(down, RowParallelLinear)
        found = gate_up.packed_numbers(), down.packed_numbers()
        if found[0] is None or found[1] is None:
            raise ModelLoadError(
                f"{self._prefix}: this MoE runner computes with weights that are plain, or packed with scales of "
                "consecutive inputs for activations that are kept"
            )
        return found[0], found[1]

    def _refuse_bias(self) -> None:
        if self._has_bias:
            raise ModelLoadError(f"{self._prefix}: this MoE runner computes without the experts' biases")

    def stacked(self) -> tuple[Tensor, Tensor]:
        context = self._context
        self._refuse_bias()
        if not self.is_plain:
            raise ModelLoadError(f"{self._prefix}: this MoE runner computes with plain weights only")
        hidden, inner = context.config.hidden_size, self.shard.part_of(self._inner)
        made = {"dtype": context.dtype, "device": context.device}
        gate_up = torch.empty(len(self._numbers), 2 * inner, hidden, **made)
        down = torch.empty(len(self._numbers), hidden, inner, **made)
        for expert, number in enumerate(self._numbers):  # each goes where it stays at once: no second copy of a layer
            for part, name in zip(gate_up[expert].chunk(2), self._names[:2], strict=True):
                part.copy_(self._read(number, name, 0))
            down[expert].copy_(self._read(number, self._names[2], 1))
        return gate_up, down

    def _read(self, number: int, name: str, sharded_dim: int) -> Tensor:
        full = f"{self._prefix}.{number}.{name}.weight"
        hidden = self._context.config.hidden_size
        shape = (hidden, self._inner) if sharded_dim else (self._inner, hidden)
        context = self._context
        if self.shard.is_whole(shape[sharded_dim]) and context.device.type != "cpu":
            return context.weights.tensor_on(full, shape, context.device)
        return self.shard.cut(context.weights.tensor(full, shape), sharded_dim, 1, full).to(context.device)
