"""Pixtral's encoder of images in their own size (arXiv:2410.07073)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import ReplicatedLinear, RMSNorm, activation
from fwk_models._common.patches import number

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5
"""Of its norms: no config says it."""


def with_marks(x: Tensor, ends: Tensor) -> Tensor:
    """x: [rows * columns, size], ends: [rows, size], what stands behind each row: [rows * (columns + 1), size]."""
    return torch.cat((x.view(len(ends), -1, x.shape[-1]), ends.to(x.dtype)[:, None]), 1).flatten(0, 1)


class PixtralEncoder:
    """An image to a row for each patch. Every rank computes all of it."""

    def __init__(self, context: ModelContext, root: str) -> None:
        """context: ``whole``. root: what names begin with."""
        weights, raw, place = context.weights, context.config.raw, (context.device, context.dtype)
        vision = cast("Mapping[str, Any]", raw["vision_config"])
        hidden, heads = number(vision, "hidden_size"), number(vision, "num_attention_heads")
        self.hidden, self.patch = hidden, number(vision, "patch_size")
        self.head_size = int(vision.get("head_dim") or hidden // heads)
        if self.head_size * heads != hidden or self.head_size % 4:
            raise ModelLoadError("config.json: vision_config's heads must have hidden_size / heads numbers, 4 * n")
        rope = cast("Mapping[str, Any]", vision.get("rope_parameters") or {})
        self.theta = float(rope.get("rope_theta") or vision.get("rope_theta") or 10_000.0)
        shape = (hidden, number(vision, "num_channels"), self.patch, self.patch)
        self.patches = weights.tensor(f"{root}.patch_conv.weight", shape).to(*place)
        self.first_norm = RMSNorm(context, f"{root}.ln_pre", hidden, EPS)
        count = number(vision, "num_hidden_layers")
        layers = f"{root}.transformer.layers"
        self.layers = [_Layer(context, f"{layers}.{index}", hidden, heads, vision) for index in range(count)]

    def __call__(self, pixels: Tensor) -> tuple[Tensor, int, int]:
        """[channels, height, width] to [rows * columns, hidden]; rows and columns of patches."""
        x = F.conv2d(pixels.to(self.patches.dtype)[None], self.patches, stride=self.patch)[0]
        rows, columns = x.shape[1:]
        x = self.first_norm(x.flatten(1).T)
        turn = self._turn(rows, columns, x)
        for layer in self.layers:
            x = layer(x, turn)
        return x, rows, columns

    def _turn(self, rows: int, columns: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each patch, [num_patches, 1, head_size]: pairs in turn by its row and by its column."""
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32, device=like.device) / self.head_size
        frequencies = self.theta**-exponents
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        row, column = (x.flatten().to(like.device, torch.float32)[:, None] for x in (row, column))
        angles = torch.cat((row * frequencies[0::2], column * frequencies[1::2]), -1)
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class _Layer:
    """Attention among all patches and a gated MLP, each on the normalised stream."""

    def __init__(self, context: ModelContext, prefix: str, hidden: int, heads: int, vision: Mapping[str, Any]) -> None:
        self.heads, inner = heads, number(vision, "intermediate_size")
        self.norms = [RMSNorm(context, f"{prefix}.{name}_norm", hidden, EPS) for name in ("attention", "ffn")]
        self.inner = [ReplicatedLinear(context, f"{prefix}.attention.{name}_proj", hidden, hidden) for name in "qkv"]
        self.output = ReplicatedLinear(context, f"{prefix}.attention.o_proj", hidden, hidden)
        mlp = f"{prefix}.feed_forward"
        self.gate, self.up = (ReplicatedLinear(context, f"{mlp}.{x}_proj", hidden, inner) for x in ("gate", "up"))
        self.down = ReplicatedLinear(context, f"{mlp}.down_proj", inner, hidden)
        self.activation = activation(str(vision["hidden_act"]))

    def __call__(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """[num_patches, hidden] to the same."""
        rows = self.norms[0](x)
        q, k, v = (linear(rows).view(len(x), self.heads, -1) for linear in self.inner)
        q, k = (_turned(part, *turn) for part in (q, k))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v)[0]
        x = x + self.output(attended.transpose(0, 1).reshape(len(x), -1))
        rows = self.norms[1](x)
        return x + self.down(self.activation(self.gate(rows)) * self.up(rows))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
