"""Linear layers: sharded by tensor-parallel rank, fused parts joined, the weight format left to a ``QuantMethod``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from fwk.errors import PluginFault, shaped
from fwk.interfaces.lora import LoRABackend, LoRALayer, LoRAPart
from fwk.interfaces.native import NativeLinear
from fwk.interfaces.parallel import SingleRank
from fwk.interfaces.quant import LayerFormat, PackedNumbers, QuantMethod, RoundedRows, Weights
from fwk_layers.sharding import WHOLE, Part, SegmentShards, Shard, load, output_cut, output_shard

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


def fitting(y: Tensor, x: Tensor | RoundedRows, width: int, method: QuantMethod) -> Tensor:
    """A quantizer's product, [num_tokens, width] in x's dtype. Raises ``PluginFault`` for anything else."""
    rows = x.shape[0]
    try:
        if y.shape == (rows, width) and y.dtype is x.dtype:
            return y
    except AttributeError:
        pass
    raise PluginFault(f"{method.label or type(method).__name__} {shaped(y, (rows, width), x.dtype)} in apply")


def _registered(backend: LoRABackend, parts: tuple[LoRAPart, ...]) -> LoRALayer:
    """The layer of these parts. Raises ``PluginFault`` for another, or one that is not at its index."""
    layer = backend.register(parts)
    if layer.parts == parts and 0 <= layer.index < len(backend.layers) and backend.layers[layer.index] == layer:
        return layer
    who = getattr(backend.register, "who", type(backend).__name__)
    raise PluginFault(f"{who} answered a layer of other parts, or of another index, in register")


class _Linear:
    """Weights on this rank and how to apply them: what both kinds of sharding have in common.

    Neighbouring parts of one format are computed as one. Mostly that is all of them: ``method`` and ``weights``.
    Where the checkpoint or the user gives parts different formats, ``pieces`` holds each, with its output's size.
    """

    bias: Tensor | None

    def __init__(
        self,
        context: ModelContext,
        parts: Sequence[Part],
        in_features: int,
        output_shards: Sequence[Shard | SegmentShards],
        input_shard: Shard,
        method: QuantMethod | None,
    ) -> None:
        forms = [context.quant.choose(part.prefix) if method is None else LayerFormat(method) for part in parts]
        self.out_features = tuple(
            shard.part_of(part.out_features) for part, shard in zip(parts, output_shards, strict=True)
        )
        self.in_features = input_shard.part_of(in_features)
        self.pieces: list[tuple[QuantMethod, Weights, int]] = []
        for form, items in groupby(zip(forms, parts, output_shards, strict=True), key=lambda item: item[0]):
            group = [(part, shard) for _, part, shard in items]
            weights = load(context, form, group, in_features, input_shard)
            self.pieces.append((form.method, weights, sum(shard.part_of(part.out_features) for part, shard in group)))
        self.method, self.weights, _ = self.pieces[0]
        self.is_mixed = len(self.pieces) > 1
        self._width = sum(size for _, _, size in self.pieces)
        self._operators = context.operators
        self._parts = list(zip(parts, output_shards, strict=True))
        self._lora = context.lora
        if self._lora is not None:
            inputs = input_shard.range(in_features)
            own = tuple(
                LoRAPart(p.prefix, in_features, p.out_features, inputs, s.range(p.out_features)) for p, s in self._parts
            )
            self._lora_layer = _registered(self._lora, own)

    @property
    def input_group(self) -> int | None:
        """``QuantMethod.input_group``, where the run's operators round inputs; None where others read them, too."""
        if self.is_mixed or self._lora is not None or not self._operators.rounds:
            return None
        return self.method.input_group(self.weights)

    def _apply(self, x: Tensor | RoundedRows) -> Tensor:
        """This rank's result, adapters included."""
        if isinstance(x, RoundedRows):
            return fitting(self.method.apply_rounded(self.weights, x, self.bias), x, self._width, self.method)
        if self.is_mixed:
            y = self._apply_mixed(x, self.bias)
        else:
            y = fitting(self.method.apply(self.weights, x, self.bias), x, self._width, self.method)
        if self._lora is None:
            return y
        why = shaped(adapted := self._lora.apply(y, x, self._lora_layer), tuple(y.shape), y.dtype)
        if why is not None:
            raise PluginFault(f"{getattr(self._lora.apply, 'who', type(self._lora).__name__)} {why} in apply")
        return adapted

    def _apply_mixed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        outputs: list[Tensor] = []
        start = 0
        for method, weights, size in self.pieces:
            part = method.apply(weights, x, None if bias is None else bias[start : start + size])
            outputs.append(fitting(part, x, size, method))
            start += size
        return self._operators.join(outputs)

    def native(self, num_slices: int) -> list[NativeLinear] | None:
        """``QuantMethod.native`` of all pieces, with their biases; None where one has no native kernel."""
        found: list[NativeLinear] = []
        start = 0
        for method, weights, size in self.pieces:
            slices = method.native(weights, num_slices) if self._lora is None else None
            if slices is None:
                return None
            for part in slices:
                first = start + part.first
                bias = None if self.bias is None else self.bias[first : first + part.out_features]
                found.append(replace(part, first=first, bias=bias))
            start += size
        return found

    def packed_numbers(self) -> PackedNumbers | None:
        """``QuantMethod.packed_numbers``; None where the layer is in pieces, has a bias or is adapted, too."""
        if len(self.pieces) != 1 or self.bias is not None or self._lora is not None:
            return None
        method, weights, _ = self.pieces[0]
        return method.packed_numbers(weights)

    def _read_bias(self, context: ModelContext) -> Tensor:
        pieces = [
            shard.cut(context.weights.tensor(f"{part.prefix}.bias", (part.out_features,)), 0, 1, f"{part.prefix}.bias")
            for part, shard in self._parts
        ]
        return torch.cat([x.to(context.device, context.dtype) for x in pieces])


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
        shards = [output_cut(part, context.tp) for part in parts]
        super().__init__(context, parts, in_features, shards, WHOLE, method)
        self.bias = self._read_bias(context) if bias else None

    def __call__(self, x: Tensor | RoundedRows) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, sum of this rank's out_features]."""
        return self._apply(x)


class ReplicatedLinear(_Linear):
    """Linear layer that every rank computes whole."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        method: QuantMethod | None = None,
    ) -> None:
        super().__init__(context, [Part(prefix, out_features)], in_features, [WHOLE], WHOLE, method)
        self.bias = self._read_bias(context) if bias else None

    def __call__(self, x: Tensor | RoundedRows) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features]."""
        return self._apply(x)


class QKVLinear(ColumnParallelLinear):
    """q_proj, k_proj, v_proj below ``prefix`` as one; whole heads per rank, KV heads repeated if ranks exceed them."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        *,
        bias: bool = False,
        method: QuantMethod | None = None,
        in_features: int | None = None,
    ) -> None:
        """in_features: where it is not the config's ``hidden_size``."""
        config = context.config
        parts = [
            Part(f"{prefix}.{name}_proj", heads * config.head_size, heads)
            for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
        ]
        super().__init__(context, parts, in_features or config.hidden_size, bias=bias, method=method)
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

    def __call__(self, x: Tensor | RoundedRows) -> Tensor:
        """[num_tokens, this rank's in_features] to [num_tokens, out_features], the same on all ranks if reduced."""
        return self.group.all_reduce(self._apply(x))
