"""Linear layers: sharded by tensor-parallel rank, fused parts joined, the weight format left to a ``QuantMethod``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.parallel import SingleRank
from fwk.interfaces.quant import LinearShape, ParamSpec, QuantMethod, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.interfaces.parallel import ParallelGroup


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix of the checkpoint; a fused layer has several, which share their input.

    num_units: pieces of the output that stay whole (heads; None: every feature is its own). When there are fewer
    than ranks, several ranks hold the same piece.
    """

    prefix: str
    out_features: int
    num_units: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of ``count`` equal pieces of a dimension this rank holds."""

    index: int
    count: int

    def part_of(self, size: int) -> int:
        """The size of this rank's piece of a dimension of ``size``."""
        return size // self.count

    def cut(self, x: Tensor, dim: int, where: str) -> Tensor:
        """This rank's piece of ``x``. Raises ``ModelLoadError`` when ``dim`` does not divide."""
        if self.count == 1:
            return x
        size, rest = divmod(x.shape[dim], self.count)
        if rest:
            raise ModelLoadError(
                f"{where}: dimension {dim} of {tuple(x.shape)} does not divide into {self.count} shards; "
                "choose a smaller --tensor-parallel-size"
            )
        return x.narrow(dim, self.index * size, size)


WHOLE = Shard(0, 1)


def output_shard(part: Part, tp: ParallelGroup) -> Shard:
    """The piece of a part's output that a rank computes."""
    units = part.out_features if part.num_units is None else part.num_units
    if units % tp.size == 0:
        return Shard(tp.rank, tp.size)
    if part.num_units is not None and tp.size % units == 0:
        return Shard(tp.rank // (tp.size // units), units)
    noun = "features" if part.num_units is None else "heads"
    raise ModelLoadError(
        f"{part.prefix}: {units} {noun} cannot be shared by {tp.size} ranks; "
        f"choose a --tensor-parallel-size that divides {units}"
    )


class _Linear:
    """A weight on this rank and how to apply it: what both kinds of sharding have in common."""

    def __init__(
        self,
        context: ModelContext,
        parts: Sequence[Part],
        in_features: int,
        output_shards: Sequence[Shard],
        input_shard: Shard,
        method: QuantMethod | None,
    ) -> None:
        self.method = context.quant if method is None else method
        self.out_features = tuple(p.out_features // s.count for p, s in zip(parts, output_shards, strict=True))
        self.shape = LinearShape(
            in_features // input_shard.count, self.out_features, context.dtype, context.device, parts[0].prefix
        )
        self._parts = list(zip(parts, output_shards, strict=True))
        loaded: dict[str, Tensor] = {}
        for name, spec in self.method.params(self.shape).items():
            pieces = self._read(context, name, spec, in_features, input_shard)
            if pieces:
                loaded[name] = _join(pieces, spec).to(context.device)
        self.weights: Weights = self.method.finish(loaded, self.shape)

    def _read(
        self, context: ModelContext, name: str, spec: ParamSpec, in_features: int, input_shard: Shard
    ) -> list[Tensor]:
        pieces: list[Tensor] = []
        for part, shard in self._parts:
            full = f"{part.prefix}.{name}"
            if spec.is_optional and not context.weights.has(full):
                continue
            x = context.weights.tensor(full, spec.shape(part.out_features, in_features))
            if spec.output_dim is not None:
                x = shard.cut(x, spec.output_dim, full)
            if spec.input_dim is not None:
                x = input_shard.cut(x, spec.input_dim, full)
            pieces.append(x.to(spec.dtype))
        if pieces and len(pieces) != len(self._parts):
            raise ModelLoadError(f"'{name}' is there for some parts of {self.shape.prefix}'s fused layer, not for all")
        return pieces

    def _read_bias(self, context: ModelContext) -> Tensor:
        pieces = [
            shard.cut(context.weights.tensor(f"{part.prefix}.bias", (part.out_features,)), 0, f"{part.prefix}.bias")
            for part, shard in self._parts
        ]
        return torch.cat([x.to(context.device, context.dtype) for x in pieces])


def _join(pieces: list[Tensor], spec: ParamSpec) -> Tensor:
    if spec.output_dim is None:  # one value for a whole part: a scale, for example
        return torch.stack(pieces)
    return torch.cat(pieces, spec.output_dim) if len(pieces) > 1 else pieces[0].contiguous()


class ColumnParallelLinear(_Linear):
    """Linear layer whose output is sharded; ``parts`` with the same input are computed as one."""

    def __init__(
        self,
        context: ModelContext,
        parts: Sequence[Part],
        in_features: int,
        *,
        bias: bool = False,
        method: QuantMethod | None = None,
    ) -> None:
        shards = [output_shard(part, context.tp) for part in parts]
        super().__init__(context, parts, in_features, shards, WHOLE, method)
        self.bias = self._read_bias(context) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, sum of this rank's out_features]."""
        return self.method.apply(self.weights, x, self.bias)


class QKVLinear(ColumnParallelLinear):
    """q_proj, k_proj, v_proj below ``prefix`` as one; whole heads per rank, KV heads repeated if ranks exceed them."""

    def __init__(
        self, context: ModelContext, prefix: str, *, bias: bool = False, method: QuantMethod | None = None
    ) -> None:
        config = context.config
        parts = [
            Part(f"{prefix}.{name}_proj", heads * config.head_size, heads)
            for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
        ]
        super().__init__(context, parts, config.hidden_size, bias=bias, method=method)
        self.num_heads = self.out_features[0] // config.head_size
        self.num_kv_heads = self.out_features[1] // config.head_size


class RowParallelLinear(_Linear):
    """Linear layer whose input is sharded; ranks' results are summed, unless the caller does it (``reduces``)."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        num_units: int | None = None,
        bias: bool = False,
        reduces: bool = True,
        method: QuantMethod | None = None,
    ) -> None:
        self.group = context.tp if reduces else SingleRank()
        # Input pieces belong to what another layer computed, so they shard as that layer's output did.
        shard = output_shard(Part(prefix, in_features, num_units), context.tp)
        super().__init__(context, [Part(prefix, out_features)], in_features, [WHOLE], shard, method)
        full_bias = self._read_bias(context) if bias else None
        self.bias = full_bias if context.tp.rank == 0 else None  # added once, not once a rank

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, this rank's in_features] to [num_tokens, out_features], the same on all ranks if reduced."""
        return self.group.all_reduce(self.method.apply(self.weights, x, self.bias))
