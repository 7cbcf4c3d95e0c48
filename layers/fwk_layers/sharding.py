"""Which part of a weight a rank holds, and how a quantisation method's tensors are read, cut and joined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import PLAIN, LayerFormat, LinearShape, ParamSpec, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.loader import WeightSource
    from fwk.interfaces.model import ModelContext
    from fwk.interfaces.parallel import ParallelGroup


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix of the checkpoint; a fused layer has several, which share their input.

    num_units: pieces of the output that stay whole (heads; None: every feature is its own). When there are fewer
    than ranks, several ranks hold the same piece.
    segments: for a matrix that is several in one (Q, K and V; gate and up): output size and units of each, in order.
    """

    prefix: str
    out_features: int
    num_units: int | None = None
    segments: tuple[tuple[int, int | None], ...] = ()


class Cut(ABC):
    """A rank's piece of one side of a matrix."""

    @abstractmethod
    def part_of(self, size: int) -> int:
        """The size of this rank's piece of a dimension of ``size``."""

    @abstractmethod
    def is_whole(self, size: int) -> bool:
        """Whether that piece is all of it."""

    @abstractmethod
    def cut(self, x: Tensor, dim: int, block: int, where: str) -> Tensor:
        """This rank's piece of ``x``, whose entries along ``dim`` stand for ``block`` features each.

        Raises ``ModelLoadError`` when ``dim`` does not divide.
        """

    def check(self, features: int, block: int, where: str, *, is_joined: bool = False) -> None:
        """Raise ``ModelLoadError`` when a piece would begin or end inside a block (is_joined: another follows it)."""
        size = self.part_of(features)
        if size % block and (size != features or is_joined):
            raise ModelLoadError(
                f"{where}: {size} features on a rank are no whole number of the blocks of {block} they are stored in; "
                "choose another --tensor-parallel-size"
            )


@dataclass(frozen=True, slots=True)
class Shard(Cut):
    """Which of ``count`` equal pieces of a dimension this rank holds."""

    index: int
    count: int

    def part_of(self, size: int) -> int:
        return size // self.count

    def is_whole(self, size: int) -> bool:
        return self.count == 1

    def range(self, size: int) -> range:
        """Which of ``size`` features this rank holds; ``count`` divides it."""
        own = self.part_of(size)
        return range(self.index * own, (self.index + 1) * own)

    def cut(self, x: Tensor, dim: int, block: int, where: str) -> Tensor:
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


@dataclass(frozen=True, slots=True)
class SegmentShards(Cut):
    """A piece of each of several matrices that are stored as one; the pieces stand in the same order."""

    sizes: tuple[int, ...]
    shards: tuple[Shard, ...]

    def part_of(self, size: int) -> int:
        return sum(shard.part_of(segment) for segment, shard in zip(self.sizes, self.shards, strict=True))

    def is_whole(self, size: int) -> bool:
        return all(shard.count == 1 for shard in self.shards)

    def range(self, size: int) -> range:
        """Which features this rank holds. Raises ``ModelLoadError`` where they do not stand together."""
        if not self.is_whole(size):
            raise ModelLoadError("adapters on layers that are stored as one need --tensor-parallel-size 1")
        return range(size)

    def cut(self, x: Tensor, dim: int, block: int, where: str) -> Tensor:
        for size in self.sizes:
            if size % block and not self.is_whole(sum(self.sizes)):
                raise ModelLoadError(
                    f"{where}: a part of {size} features is no whole number of the blocks of {block} they are stored "
                    "in; set --tensor-parallel-size 1"
                )
        if self.is_whole(sum(self.sizes)):
            return x
        pieces = x.split([size // block for size in self.sizes], dim)
        cuts = [shard.cut(piece, dim, block, where) for piece, shard in zip(pieces, self.shards, strict=True)]
        return torch.cat(cuts, dim)

    def check(self, features: int, block: int, where: str, *, is_joined: bool = False) -> None:
        for size, shard in zip(self.sizes, self.shards, strict=True):
            shard.check(size, block, where, is_joined=is_joined or not self.is_whole(features))


@dataclass(frozen=True, slots=True)
class PaddedRows(Cut):
    """``num_rows`` rows from ``first`` on; where the matrix ends before them, zeros follow."""

    first: int
    num_rows: int

    @staticmethod
    def of(total: int, tp: ParallelGroup) -> PaddedRows:
        """A rank's share of ``total`` rows that need not divide."""
        num_rows = -(-total // tp.size)
        return PaddedRows(min(tp.rank * num_rows, total), num_rows)

    def part_of(self, size: int) -> int:
        return self.num_rows

    def is_whole(self, size: int) -> bool:
        return self.first == 0 and self.num_rows == size

    def cut(self, x: Tensor, dim: int, block: int, where: str) -> Tensor:
        first, count = self.first // block, -(-self.num_rows // block)
        mine = x.narrow(dim, first, max(min(count, x.shape[dim] - first), 0))
        missing = count - mine.shape[dim]
        return F.pad(mine, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else mine


def output_cut(part: Part, tp: ParallelGroup) -> Shard | SegmentShards:
    """The piece of a part's output that a rank computes, of each of its segments where it has some."""
    if not part.segments:
        return output_shard(part, tp)
    shards = [output_shard(Part(part.prefix, size, units), tp) for size, units in part.segments]
    return SegmentShards(tuple(size for size, _ in part.segments), tuple(shards))


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


def rank_rows(context: ModelContext, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
    """This rank's rows of a small plain tensor that goes with a sharded layer: a convolution's kernel, a factor a head.

    part: what its rows stand for; ``prefix`` is for errors.
    """
    whole = context.weights.tensor(name, shape)
    return output_cut(part, context.tp).cut(whole, 0, 1, name).to(context.device).contiguous()


def load(
    context: ModelContext,
    form: LayerFormat,
    parts: Sequence[tuple[Part, Cut]],
    in_features: int,
    input_cut: Cut = WHOLE,
) -> Weights:
    """Read the parts of one layer from the checkpoint, cut them, join them and hand them to their method."""
    out_features = tuple(cut.part_of(part.out_features) for part, cut in parts)
    first = parts[0][0].prefix
    shape = LinearShape(input_cut.part_of(in_features), out_features, context.dtype, context.device, first, form.layout)
    version = form.method.packed_version
    if version is None:
        return form.method.finish(_loaded(context, form, parts, in_features, input_cut, shape), shape)
    key = repr((version, form.layout, str(context.dtype), parts, in_features, input_cut))
    found = context.weights_cache.find(key)
    if found is not None:
        return form.method.from_packed(found)
    weights = form.method.finish(_loaded(context, form, parts, in_features, input_cut, shape), shape)
    names = ("weight",) if form.layout == PLAIN else tuple(form.method.params(shape))
    context.weights.release(f"{part.prefix}.{name}" for part, _ in parts for name in names)  # packing has copied it
    context.weights_cache.store_at_once(key, partial(form.method.to_packed, weights))
    return weights


def _loaded(
    context: ModelContext,
    form: LayerFormat,
    parts: Sequence[tuple[Part, Cut]],
    in_features: int,
    input_cut: Cut,
    shape: LinearShape,
) -> Mapping[str, Tensor]:
    """What the parts' method reads of them, sharded and joined."""
    specs, first = form.method.params(shape), shape.prefix
    is_whole = input_cut.is_whole(in_features) and all(cut.is_whole(part.out_features) for part, cut in parts)
    if is_whole and form.layout == PLAIN and not form.method.is_encoding:
        whole = [part for part, _ in parts]
        return {"weight": _joined(context.weights, whole, in_features, specs["weight"].dtype, context.device)}
    pieces: dict[str, list[Tensor]] = {name: [] for name in specs}
    for part, cut in parts:
        for name, x in _read(context.weights, form, part, in_features, specs, context.device).items():
            spec, full = specs[name], f"{part.prefix}.{name}"
            if spec.output_dim is not None:
                cut.check(part.out_features, spec.output_block, full, is_joined=len(parts) > 1)
                x = cut.cut(x, spec.output_dim, spec.output_block, full)
            if spec.input_dim is not None and spec.shards_input:
                input_cut.check(in_features, spec.input_block, full)
                x = input_cut.cut(x, spec.input_dim, spec.input_block, full)
            pieces[name].append(x.to(context.device).to(spec.dtype))  # the host only copies
    loaded: dict[str, Tensor] = {}
    for name, found in pieces.items():
        if found and len(found) != len(parts):
            raise ModelLoadError(f"'{name}' is there for some parts of {first}'s fused layer, not for all")
        if found:
            loaded[name] = _join(found, specs[name])
    return loaded


def plain_weight(context: ModelContext, prefix: str, out_features: int, in_features: int) -> Tensor:
    """A whole matrix as plain numbers, [out_features, in_features], for a layer that computes with nothing else."""
    if PLAIN in context.weights.layouts(prefix):
        return context.weights.tensor(f"{prefix}.weight", (out_features, in_features))
    form = context.quant.choose(prefix)
    weights = load(context, form, [(Part(prefix, out_features), WHOLE)], in_features)
    unit = torch.eye(in_features, device=context.device)
    return form.method.apply(weights, unit, None).t()


def _joined(
    weights: WeightSource, parts: Sequence[Part], in_features: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Whole plain weights of all parts, [sum of out_features, in_features], each read to its place.

    A device that is not the host gets them as they are stored: one pass over the bytes is all that the host does.
    """
    sizes = [part.out_features for part in parts]
    if device.type != "cpu":
        found = [weights.tensor_on(f"{part.prefix}.weight", (part.out_features, in_features), device) for part in parts]
        if len(parts) == 1:
            return found[0].to(dtype).contiguous()
        joined = torch.empty(sum(sizes), in_features, dtype=dtype, device=device)
        for x, rows in zip(found, joined.split(sizes), strict=True):
            rows.copy_(x)
        return joined
    if len(parts) == 1:
        return weights.tensor_as(f"{parts[0].prefix}.weight", (sizes[0], in_features), dtype).contiguous()
    joined = torch.empty(sum(sizes), in_features, dtype=dtype)
    for part, rows in zip(parts, joined.split(sizes), strict=True):
        weights.tensor_as(f"{part.prefix}.weight", (part.out_features, in_features), dtype, rows)
    return joined


def _read(
    weights: WeightSource,
    form: LayerFormat,
    part: Part,
    in_features: int,
    specs: Mapping[str, ParamSpec],
    device: torch.device,
) -> Mapping[str, Tensor]:
    """The tensors of one part, whole. Those that are encoded are on the device, which does that."""
    if form.layout == PLAIN:
        name, size, dtype = f"{part.prefix}.weight", (part.out_features, in_features), form.method.encodes_from
        if device.type != "cpu":
            weight = weights.tensor_on(name, size, device)
            weight = weight if dtype is None else weight.to(dtype)
        else:
            weight = weights.tensor(name, size) if dtype is None else weights.tensor_as(name, size, dtype)
        return form.method.encode(weight, part.prefix)
    made = form.method.read(weights, part.prefix, form.layout, (part.out_features, in_features))
    if made is not None:
        return made
    return {
        name: _fit(
            weights.raw(f"{part.prefix}.{name}"),
            f"{part.prefix}.{name}",
            spec,
            spec.shape(part.out_features, in_features),
            form.layout,
        )
        for name, spec in specs.items()
        if not spec.is_optional or weights.has(f"{part.prefix}.{name}")
    }


def _fit(x: Tensor, name: str, spec: ParamSpec, shape: tuple[int, ...], layout: str) -> Tensor:
    """A stored tensor in the shape its method expects; a single number where it stands for all."""
    if x.numel() == 1 and spec.is_uniform:
        x = x.reshape(1).expand(shape)
    if tuple(x.shape) != shape and [n for n in x.shape if n != 1] != [n for n in shape if n != 1]:
        raise ModelLoadError(
            f"{name} has the shape {tuple(x.shape)}, but {layout} as config.json describes it needs {shape}: the "
            "group size or number of bits there and the weights do not belong together"
        )
    if x.dtype != spec.dtype and not (_is_float(x.dtype) and _is_float(spec.dtype)):
        raise ModelLoadError(f"{name} holds {x.dtype} numbers, but {layout} needs {spec.dtype}: the file is damaged")
    return x.reshape(shape)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float16, torch.bfloat16)


def _join(pieces: list[Tensor], spec: ParamSpec) -> Tensor:
    if spec.output_dim is None:  # one value for a whole part: a scale, for example
        return torch.stack(pieces)
    return torch.cat(pieces, spec.output_dim) if len(pieces) > 1 else pieces[0].contiguous()
