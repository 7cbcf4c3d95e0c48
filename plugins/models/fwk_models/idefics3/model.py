"""Idefics3: SigLIP's encoder (Zhai et al. 2023, arXiv:2303.15343), a connector, and Llama's decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, ReplicatedLinear
from fwk_models._common.llama import LlamaDecoder
from fwk_models._common.vision import EncoderLayer, Sizes, whole

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_ROOTS = ("model.vision_model.", "model.connector.")
MAX_TILES = 8
"""Tiles encoded at once: more take more memory, and are no faster. One, where numbers may not depend on others."""


class Idefics3(LlamaDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    root = "model.text_model"

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.images = ImageEncoder(context) if context.encodes("image") else None
        self.most = 1 if context.is_deterministic else MAX_TILES
        if self.images is None:
            for name in context.weights.names():
                if name.startswith(IMAGE_ROOTS):
                    context.weights.skip(name)

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of tiles, ``pixel_values`` [3, size, size] each: [(size / patch_size / scale_factor)^2, hidden_size]."""
        assert kind == "image"
        assert self.images is not None, "the run takes no images"
        tiles = [item["pixel_values"] for item in items]
        batches = [torch.stack(tiles[i : i + self.most]) for i in range(0, len(tiles), self.most)]
        return [rows for batch in batches for rows in self.images(batch)]


class ImageEncoder:
    """Tiles to rows. Every rank computes all of it, and adapters leave it as it is."""

    def __init__(self, context: ModelContext) -> None:
        context = whole(context)
        sizes = self.sizes = Sizes(context.config.raw)
        self.scale = context.config.integer("scale_factor", 2)
        place, prefix = (context.device, context.dtype), "model.vision_model"
        name = f"{prefix}.embeddings.patch_embedding"
        shape = (sizes.hidden, sizes.num_channels, sizes.patch, sizes.patch)
        self.patches = context.weights.tensor(f"{name}.weight", shape).to(*place)
        self.patch_bias = context.weights.tensor(f"{name}.bias", (sizes.hidden,)).to(*place)
        positions = (sizes.per_side**2, sizes.hidden)
        self.positions = context.weights.tensor(f"{prefix}.embeddings.position_embedding.weight", positions).to(*place)
        self.layers = [EncoderLayer(context, f"{prefix}.encoder.layers.{i}", sizes) for i in range(sizes.num_layers)]
        self.norm = LayerNorm(context, f"{prefix}.post_layernorm", sizes.hidden, sizes.eps)
        name = "model.connector.modality_projection.proj"
        self.projection = ReplicatedLinear(context, name, sizes.hidden * self.scale**2, context.config.hidden_size)

    def __call__(self, tiles: Tensor) -> Tensor:
        """[num_tiles, channels, size, size] to [num_tiles, (size / patch / scale)^2, hidden_size of the decoder]."""
        x = F.conv2d(tiles.to(self.patches.dtype), self.patches, self.patch_bias, stride=self.sizes.patch)
        x = x.flatten(2).transpose(1, 2) + self.positions[self._places(tiles.shape[-1] // self.sizes.patch)]
        for layer in self.layers:
            x = layer(x)
        x = self._joined(self.norm(x))
        return self.projection(x.flatten(0, 1)).view(*x.shape[:2], -1)

    def _places(self, count: int) -> Tensor:
        """Which position each of ``count`` times ``count`` patches takes, by its place in the whole (NaViT).

        Computed in float32 as transformers does it: on a border between two, rounding decides.
        """
        step = 1 / self.sizes.per_side
        borders = torch.arange(step, 1.0, step, device=self.positions.device)
        places = torch.arange(count, dtype=torch.float32, device=borders.device)
        nth = torch.bucketize((places * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6), borders, right=True)
        return (nth[:, None] * self.sizes.per_side + nth).flatten()

    def _joined(self, x: Tensor) -> Tensor:
        """Squares of ``scale`` times ``scale`` patches as one: [num_tiles, n, size] to [.., n / s^2, size * s^2]."""
        scale, side = self.scale, round(x.shape[1] ** 0.5)
        x = x.view(x.shape[0], side // scale, scale, side // scale, scale, x.shape[2])
        return x.transpose(2, 3).reshape(x.shape[0], (side // scale) ** 2, -1)
