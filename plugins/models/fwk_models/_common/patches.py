"""Encoders of images of any size: transformers over the patches of one, which are turned by their row and column.

Patches come in squares of ``merge`` times ``merge``, row by row of squares: what a square holds becomes one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, ReplicatedLinear, RMSNorm, activation
from fwk_models._common.vision import whole

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6
"""Of every norm here: no config says it."""
THETA = 10_000.0
"""Of the angles, likewise."""


@dataclass(frozen=True, slots=True)
class Eyes:
    """``vision_config``: the sizes, and what sets the generations apart.

    mlp: the names of the MLP's layers, gate first where it has one. window: side of a window in patches, in every block
    but those of ``whole_blocks``; 0: none has one. num_positions: of the learned grid that is added to the patches; 0:
    none. deep: blocks whose patches are given to the decoder's first layers, too (DeepStack, arXiv:2406.04334).
    """

    hidden: int
    inner: int
    depth: int
    num_heads: int
    channels: int
    patch: int
    merge: int
    times: int
    out: int
    act: str
    mlp: tuple[str, ...]
    has_rms: bool = False
    has_patch_bias: bool = False
    window: int = 0
    whole_blocks: frozenset[int] = frozenset()
    num_positions: int = 0
    deep: tuple[int, ...] = ()


def number(vision: Mapping[str, Any], name: str) -> int:
    """A size of ``vision_config``. Raises ``ModelLoadError``."""
    value = vision.get(name)
    if isinstance(value, list | tuple) and len(set(cast("Sequence[Any]", value))) == 1:
        value = cast("Sequence[Any]", value)[0]  # a side for each direction
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**20:
        raise ModelLoadError(f"config.json: vision_config's {name!r} must be a whole number, not {value!r}")
    return value


def blocks_of(vision: Mapping[str, Any], name: str, depth: int) -> tuple[int, ...]:
    """A list of blocks' numbers. Raises ``ModelLoadError``."""
    value = vision.get(name)
    if not isinstance(value, list | tuple) or not all(
        isinstance(n, int) and 0 <= n < depth for n in cast("Sequence[Any]", value)
    ):
        raise ModelLoadError(f"config.json: vision_config's {name!r} must list blocks from 0 to {depth - 1}")
    return tuple(cast("Sequence[int]", value))


LEARNED_GRID_MERGER = ("norm", "linear_fc1", "linear_fc2")


def with_learned_grid(vision: Mapping[str, Any], deep: tuple[int, ...] = ()) -> Eyes:
    """Of Qwen3-VL and Qwen3.5, from ``vision_config``. Raises ``ModelLoadError``."""
    positions = number(vision, "num_position_embeddings")
    if round(positions**0.5) ** 2 != positions:
        raise ModelLoadError("config.json: vision_config's 'num_position_embeddings' is no square")
    return Eyes(
        hidden=number(vision, "hidden_size"),
        inner=number(vision, "intermediate_size"),
        depth=number(vision, "depth"),
        num_heads=number(vision, "num_heads"),
        channels=number(vision, "in_channels"),
        patch=number(vision, "patch_size"),
        merge=number(vision, "spatial_merge_size"),
        times=number(vision, "temporal_patch_size"),
        out=number(vision, "out_hidden_size"),
        act=str(vision["hidden_act"]),
        mlp=("linear_fc1", "linear_fc2"),
        has_patch_bias=True,
        num_positions=positions,
        deep=deep,
    )


class Run(NamedTuple):
    """Patches that see each other: ``size`` neighbours from ``start`` on, and as many again, ``groups`` times."""

    start: int
    groups: int
    size: int


class Picture(NamedTuple):
    """What is known of an image before its pixels: how its patches are ordered, turned, and whom they see."""

    order: Tensor  # [num_squares]: which square of the image stands where, so that windows are together
    cos: Tensor  # [num_patches, 1, head_size] float32, in that order
    sin: Tensor
    windows: list[Run]
    all: list[Run]  # one of all patches


class PatchEncoder:
    """Patches of one image to rows of the decoder's size. Every rank computes all of it, and adapters leave it so."""

    def __init__(self, context: ModelContext, root: str, eyes: Eyes, merger: Sequence[str]) -> None:
        """merger: names of its norm and of its two layers."""
        context = whole(context)
        self.eyes, self.device = eyes, context.device
        if eyes.hidden % (4 * eyes.num_heads):
            raise ModelLoadError("config.json: vision_config's heads must have a multiple of 4 numbers")
        shape = (eyes.hidden, eyes.channels, eyes.times, eyes.patch, eyes.patch)
        weight = context.weights.tensor(f"{root}.patch_embed.proj.weight", shape)
        self.patches = weight.flatten(1).to(context.device, context.dtype)
        self.patch_bias = None
        if eyes.has_patch_bias:
            bias = context.weights.tensor(f"{root}.patch_embed.proj.bias", (eyes.hidden,))
            self.patch_bias = bias.to(context.device, context.dtype)
        self.positions = None
        if eyes.num_positions:
            learned = context.weights.tensor(f"{root}.pos_embed.weight", (eyes.num_positions, eyes.hidden))
            self.positions = learned.to(context.device, context.dtype)
        self.blocks = [_Block(context, f"{root}.blocks.{index}", eyes) for index in range(eyes.depth)]
        norm, *layers = merger
        self.merger = _Merger(context, f"{root}.merger", eyes, norm, layers)
        self.mergers = {
            block: _Merger(context, f"{root}.deepstack_merger_list.{i}", eyes, norm, layers, joins_first=True)
            for i, block in enumerate(eyes.deep)
        }

    def __call__(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """[rows * columns, channels * times * patch^2] to [.. / merge^2, (1 + num_deep) * size of the decoder].

        rows, columns: of patches. The first of each row is what replaces a token's embedding, the others are added
        behind the decoder's first layers, in turn.
        """
        picture = self.picture(rows, columns)
        x = F.linear(patches.to(self.patches.dtype), self.patches, self.patch_bias)
        if self.positions is not None:
            x = x + self._learned(rows, columns)
        x = self._squares(x)[picture.order].flatten(0, 1)
        deep: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            sees_all = not self.eyes.window or index in self.eyes.whole_blocks
            x = block(x, picture, picture.all if sees_all else picture.windows)
            if index in self.mergers:
                deep.append(self.mergers[index](x))
        found = torch.cat([self.merger(x), *deep], -1)
        return torch.empty_like(found).index_copy_(0, picture.order, found)

    def _squares(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.eyes.merge**2))

    def picture(self, rows: int, columns: int) -> Picture:
        """How an image of so many patches is computed."""
        merge = self.eyes.merge
        order, windows = _windows(rows // merge, columns // merge, self.eyes.window // merge)
        order = order.to(self.device)
        size = self.eyes.hidden // self.eyes.num_heads
        frequencies = THETA ** -(torch.arange(0, size // 2, 2, dtype=torch.float32, device=self.device) / (size // 2))
        places = torch.stack(_places(rows, columns, merge, self.device), -1)  # [num_patches, 2]
        angles = (places[..., None] * frequencies).flatten(1)
        angles = self._squares(torch.cat((angles, angles), -1))[order].flatten(0, 1).unsqueeze(1)
        runs = [Run(run.start * merge**2, run.groups, run.size * merge**2) for run in windows]
        return Picture(order, angles.cos(), angles.sin(), runs, [Run(0, 1, rows * columns)])

    def _learned(self, rows: int, columns: int) -> Tensor:
        """[num_patches, hidden]: the learned grid stretched over the image, its corners in the corners (bilinear)."""
        assert self.positions is not None
        side = round(self.eyes.num_positions**0.5)
        row, column = _places(rows, columns, self.eyes.merge, self.device)

        def taps(place: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
            exact = place * (side - 1) / max(count - 1, 1)
            low = exact.floor()
            return low.long(), (low.long() + 1).clamp(max=side - 1), exact - low

        (top, bottom, down), (left, right, along) = taps(row, rows), taps(column, columns)
        corners = ((top, left, (1 - down) * (1 - along)), (top, right, (1 - down) * along),
                   (bottom, left, down * (1 - along)), (bottom, right, down * along))  # fmt: skip
        found = [self.positions[y * side + x] * weight[:, None] for y, x, weight in corners]
        return sum(found[1:], found[0]).to(self.positions.dtype)


def _places(rows: int, columns: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, [num_patches] float32 each, square by square."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    shape = (rows // merge, merge, columns // merge, merge)
    found = [x.reshape(shape).transpose(1, 2).flatten().to(device, torch.float32) for x in (row, column)]
    return found[0], found[1]


def _windows(rows: int, columns: int, side: int) -> tuple[Tensor, list[Run]]:
    """The order of the squares so that those of a window are together, and windows of one size one after another.

    side: of a window in squares; 0: there are none, and squares stay where they are.
    """
    index = torch.arange(rows * columns).view(rows, columns)
    if not side:
        return index.flatten(), []
    by_size: dict[int, list[Tensor]] = {}
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            window = index[top : top + side, left : left + side].flatten()
            by_size.setdefault(len(window), []).append(window)
    runs, start = list[Run](), 0
    for size, found in by_size.items():
        runs.append(Run(start, len(found), size))
        start += size * len(found)
    return torch.cat([window for found in by_size.values() for window in found]), runs


class _Block:
    """Attention among patches and an MLP, each on the normalised stream."""

    def __init__(self, context: ModelContext, prefix: str, eyes: Eyes) -> None:
        hidden, make_norm = eyes.hidden, RMSNorm if eyes.has_rms else LayerNorm
        self.num_heads = eyes.num_heads
        self.norms = [make_norm(context, f"{prefix}.norm{i}", hidden, EPS) for i in (1, 2)]
        self.qkv = ReplicatedLinear(context, f"{prefix}.attn.qkv", hidden, 3 * hidden, bias=True)
        self.output = ReplicatedLinear(context, f"{prefix}.attn.proj", hidden, hidden, bias=True)
        self.activation = activation(eyes.act)
        *ups, down = eyes.mlp
        self.ups = [ReplicatedLinear(context, f"{prefix}.mlp.{name}", hidden, eyes.inner, bias=True) for name in ups]
        self.down = ReplicatedLinear(context, f"{prefix}.mlp.{down}", eyes.inner, hidden, bias=True)

    def __call__(self, x: Tensor, picture: Picture, runs: Sequence[Run]) -> Tensor:
        """[num_patches, hidden] to the same."""
        x = x + self._attended(self.norms[0](x), picture, runs)
        rows = self.norms[1](x)
        inner = self.activation(self.ups[0](rows))
        return x + self.down(inner * self.ups[1](rows) if len(self.ups) > 1 else inner)

    def _attended(self, x: Tensor, picture: Picture, runs: Sequence[Run]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        q, k = (_turned(part, picture) for part in (q, k))
        found: list[Tensor] = []
        for start, groups, size in runs:
            rows = slice(start, start + groups * size)
            q_, k_, v_ = (part[rows].unflatten(0, (groups, size)).transpose(1, 2) for part in (q, k, v))
            attended = F.scaled_dot_product_attention(q_, k_, v_)
            found.append(attended.transpose(1, 2).reshape(groups * size, -1))
        return self.output(torch.cat(found))


def _turned(x: Tensor, picture: Picture) -> Tensor:
    """[num_patches, num_heads, head_size], by float32 angles."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * picture.cos + torch.cat((-second, first), -1) * picture.sin).to(x.dtype)


class _Merger:
    """The patches of a square as one row: a norm and an MLP with GELU."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        eyes: Eyes,
        norm: str,
        layers: Sequence[str],
        *,
        joins_first: bool = False,
    ) -> None:
        """joins_first: the norm is of squares, and not of patches."""
        self.size, self.joins_first = eyes.hidden * eyes.merge**2, joins_first
        make_norm = RMSNorm if eyes.has_rms else LayerNorm
        self.norm = make_norm(context, f"{prefix}.{norm}", self.size if joins_first else eyes.hidden, EPS)
        first, second = layers
        self.up = ReplicatedLinear(context, f"{prefix}.{first}", self.size, self.size, bias=True)
        self.down = ReplicatedLinear(context, f"{prefix}.{second}", self.size, eyes.out, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_patches, hidden] to [num_patches / merge^2, out]."""
        x = self.norm(x.reshape(-1, self.size)) if self.joins_first else self.norm(x).reshape(-1, self.size)
        return self.down(F.gelu(self.up(x)))
