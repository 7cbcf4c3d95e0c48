"""Mistral 3: images to rows by Pixtral's encoder (arXiv:2410.07073); each row of an image ends with a token's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk.layers import ReplicatedLinear, RMSNorm, activation
from fwk_models._common.nested_text import NestedDecoder
from fwk_models._common.patches import number
from fwk_models._common.vision import whole

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5
"""Of the encoder's norms: no config says it."""


class Mistral3(NestedDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.images = ImageEncoder(context, self.outer) if "image" in context.media else None
        if self.images is None:
            self.skip(context, "vision_tower.", "multi_modal_projector.")

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of images, ``pixel_values`` [3, height, width] and ``marks`` [rows], the token behind each row of the image.

        [rows * (columns + 1), hidden_size] each. One after another: they are of different sizes.
        """
        assert kind == "image"
        assert self.images is not None, "the run takes no images"
        return [self._rows(self.images(item["pixel_values"]), item["marks"]) for item in items]

    def _rows(self, x: Tensor, marks: Tensor) -> Tensor:
        """x: [rows * columns, hidden_size]; with the marks' embeddings behind each row."""
        ends = self.embedding(marks).to(x.dtype)
        return torch.cat((x.view(len(marks), -1, x.shape[-1]), ends[:, None]), 1).flatten(0, 1)


class ImageEncoder:
    """An image to rows. Every rank computes all of it, and adapters leave it as it is."""

    def __init__(self, context: ModelContext, outer: str) -> None:
        """outer: what names begin with."""
        context = whole(context)
        weights, raw, place = context.weights, context.config.raw, (context.device, context.dtype)
        vision = cast("Mapping[str, Any]", raw["vision_config"])
        hidden, heads = number(vision, "hidden_size"), number(vision, "num_attention_heads")
        self.patch, self.merge = number(vision, "patch_size"), int(raw.get("spatial_merge_size", 2))
        self.head_size = int(vision.get("head_dim") or hidden // heads)
        if self.head_size * heads != hidden or self.head_size % 4:
            raise ModelLoadError("config.json: vision_config's heads must have hidden_size / heads numbers, 4 * n")
        rope = cast("Mapping[str, Any]", vision.get("rope_parameters") or {})
        self.theta = float(rope.get("rope_theta") or vision.get("rope_theta") or 10_000.0)
        root = f"{outer}vision_tower"
        shape = (hidden, number(vision, "num_channels"), self.patch, self.patch)
        self.patches = weights.tensor(f"{root}.patch_conv.weight", shape).to(*place)
        self.first_norm = RMSNorm(context, f"{root}.ln_pre", hidden, EPS)
        count = number(vision, "num_hidden_layers")
        layers = f"{root}.transformer.layers"
        self.layers = [_Layer(context, f"{layers}.{index}", hidden, heads, vision) for index in range(count)]
        projector, size = f"{outer}multi_modal_projector", context.config.hidden_size
        self.norm = RMSNorm(context, f"{projector}.norm", hidden, context.config.rms_norm_eps)
        merged, bias = hidden * self.merge**2, bool(raw.get("multimodal_projector_bias", False))
        self.merger = ReplicatedLinear(context, f"{projector}.patch_merger.merging_layer", merged, hidden)
        self.up = ReplicatedLinear(context, f"{projector}.linear_1", hidden, size, bias=bias)
        self.down = ReplicatedLinear(context, f"{projector}.linear_2", size, size, bias=bias)
        self.activation = activation(str(raw.get("projector_hidden_act", "gelu")))

    def __call__(self, pixels: Tensor) -> Tensor:
        """[channels, height, width] to [height * width / (patch * merge)^2, hidden_size of the decoder]."""
        x = F.conv2d(pixels.to(self.patches.dtype)[None], self.patches, stride=self.patch)[0]
        rows, columns = x.shape[1:]
        x = self.first_norm(x.flatten(1).T)
        turn = self._turn(rows, columns, x)
        for layer in self.layers:
            x = layer(x, turn)
        x = self.norm(x).T.view(1, -1, rows, columns)
        x = self.merger(F.unfold(x, self.merge, stride=self.merge)[0].T)  # a square's patches, column by column
        return self.down(self.activation(self.up(x)))

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
