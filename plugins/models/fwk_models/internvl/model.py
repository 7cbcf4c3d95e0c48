"""InternVL: tiles to rows by InternViT, four patches of which are joined to one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, ReplicatedLinear, RMSNorm, activation
from fwk_models._common.nested_text import NestedDecoder
from fwk_models._common.patches import number
from fwk_models._common.vision import whole

if TYPE_CHECKING:
    from torch import Tensor

MAX_TILES = 8
"""Tiles encoded at once. One, where numbers may not depend on others."""


class InternVL(NestedDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.images = ImageEncoder(context, self.outer) if context.encodes("image") else None
        self.most = 1 if context.is_deterministic else MAX_TILES
        if self.images is None:
            self.skip(context, "vision_tower.", "multi_modal_projector.")
        else:
            context.weights.skip(f"{self.outer}vision_tower.embeddings.mask_token")

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of tiles, ``pixel_values`` [3, height, width] each: [num_patches / 4, hidden_size]."""
        assert kind == "image"
        assert self.images is not None, "the run takes no images"
        tiles = [item["pixel_values"] for item in items]
        batches = [torch.stack(tiles[i : i + self.most]) for i in range(0, len(tiles), self.most)]
        return [rows for batch in batches for rows in self.images(batch)]


class ImageEncoder:
    """Tiles to rows. Every rank computes all of it, and adapters leave it as it is."""

    def __init__(self, context: ModelContext, outer: str) -> None:
        """outer: what names begin with."""
        context = whole(context)
        weights, raw, place = context.weights, context.config.raw, (context.device, context.dtype)
        vision = cast("Mapping[str, Any]", raw["vision_config"])
        self.hidden, self.patch = number(vision, "hidden_size"), number(vision, "patch_size")
        self.side = number(vision, "image_size") // self.patch
        ratio = float(raw.get("downsample_ratio", 0.5))
        self.join = round(1 / ratio) if ratio > 0 else 0
        if not self.join or self.side % self.join:
            raise ModelLoadError(f"config.json: 'downsample_ratio' {ratio!r} does not divide {self.side} patches")
        names = f"{outer}vision_tower.embeddings"
        shape = (self.hidden, number(vision, "num_channels"), self.patch, self.patch)
        self.patches = weights.tensor(f"{names}.patch_embeddings.projection.weight", shape).to(*place)
        self.patch_bias = weights.tensor(f"{names}.patch_embeddings.projection.bias", (self.hidden,)).to(*place)
        self.first = weights.tensor(f"{names}.cls_token", (1, 1, self.hidden)).to(*place)
        self.positions = None
        if vision["use_absolute_position_embeddings"]:
            shape = (1, self.side**2 + 1, self.hidden)
            self.positions = weights.tensor(f"{names}.position_embeddings", shape).to(*place)
        count = number(vision, "num_hidden_layers")
        layers = f"{outer}vision_tower.encoder.layer"
        self.layers = [_Layer(context, f"{layers}.{index}", self.hidden, vision) for index in range(count)]
        self.norm = None
        if not vision["use_mean_pooling"]:
            eps = float(vision["layer_norm_eps"])
            self.norm = LayerNorm(context, f"{outer}vision_tower.layernorm", self.hidden, eps)
        projector, joined, size = (
            f"{outer}multi_modal_projector",
            self.hidden * self.join**2,
            context.config.hidden_size,
        )
        self.joined_norm = LayerNorm(context, f"{projector}.layer_norm", joined, 1e-5)
        self.up = ReplicatedLinear(context, f"{projector}.linear_1", joined, size, bias=True)
        self.down = ReplicatedLinear(context, f"{projector}.linear_2", size, size, bias=True)

    def __call__(self, tiles: Tensor) -> Tensor:
        """[num_tiles, channels, size, size] to [num_tiles, (size / patch / join)^2, hidden_size of the decoder]."""
        x = F.conv2d(tiles.to(self.patches.dtype), self.patches, self.patch_bias, stride=self.patch)
        x = torch.cat((self.first.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)), 1)
        if self.positions is not None:
            x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        x = self._joined(x[:, 1:])
        rows = self.down(F.gelu(self.up(self.joined_norm(x.flatten(0, 1)))))
        return rows.view(len(x), -1, rows.shape[-1])

    def _joined(self, x: Tensor) -> Tensor:
        """Squares of patches as one, column by column within a row's pair: [num_tiles, n, size] to [.., n/j^2, ..]."""
        side, join = self.side, self.join
        x = x.view(len(x), side // join, join, side // join, join, -1)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(len(x), (side // join) ** 2, -1)


class _Layer:
    """Attention among a tile's patches and an MLP, each on the normalised stream and with a factor by column."""

    def __init__(self, context: ModelContext, prefix: str, hidden: int, vision: Mapping[str, Any]) -> None:
        self.heads, inner = number(vision, "num_attention_heads"), number(vision, "intermediate_size")
        if hidden % self.heads:
            raise ModelLoadError("config.json: vision_config's 'hidden_size' is no multiple of 'num_attention_heads'")
        kinds = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
        kind = str(vision["norm_type"])
        if kind not in kinds:
            raise ModelLoadError(
                f"config.json: vision_config's 'norm_type' is {kind!r}; internvl has {', '.join(kinds)}"
            )
        eps, bias = float(vision["layer_norm_eps"]), bool(vision["attention_bias"])
        self.norms = [kinds[kind](context, f"{prefix}.layernorm_{name}", hidden, eps) for name in ("before", "after")]
        self.inner = [ReplicatedLinear(context, f"{prefix}.attention.{name}_proj", hidden, hidden, bias=bias)
                      for name in "qkv"]  # fmt: skip
        has_norms = bool(vision["use_qk_norm"])
        self.qk = [RMSNorm(context, f"{prefix}.attention.{x}_norm", hidden, 1e-6) for x in "qk"] if has_norms else []
        self.output = ReplicatedLinear(context, f"{prefix}.attention.projection_layer", hidden, hidden, bias=True)
        self.up = ReplicatedLinear(context, f"{prefix}.mlp.fc1", hidden, inner, bias=True)
        self.down = ReplicatedLinear(context, f"{prefix}.mlp.fc2", inner, hidden, bias=True)
        self.activation = activation(str(vision["hidden_act"]))
        factors = (context.weights.tensor(f"{prefix}.lambda_{i}", (hidden,)) for i in (1, 2))
        self.attention_factor, self.mlp_factor = (x.to(context.device, context.dtype) for x in factors)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tiles, num_patches, size] to the same."""
        rows = self.norms[0](x).flatten(0, 1)
        parts = [linear(rows) for linear in self.inner]
        for i, norm in enumerate(self.qk):
            parts[i] = norm(parts[i])
        q, k, v = (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(rows), -1)
        x = x + (self.output(attended) * self.attention_factor).view_as(x)
        rows = self.norms[1](x).flatten(0, 1)
        return x + (self.down(self.activation(self.up(rows))) * self.mlp_factor).view_as(x)
