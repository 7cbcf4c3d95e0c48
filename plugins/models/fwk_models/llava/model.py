"""LLaVA: CLIP's encoder (Radford et al. 2021, arXiv:2103.00020) or Pixtral's, an MLP, and a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm
from fwk_models._common.nested_text import NestedDecoder
from fwk_models._common.pixtral import PixtralEncoder, with_marks
from fwk_models._common.projector import Projector
from fwk_models._common.vision import EncoderLayer, Sizes, num_layers_before, whole

if TYPE_CHECKING:
    from torch import Tensor

MAX_IMAGES = 8
"""Images encoded at once. One, where numbers may not depend on others."""


class Llava(NestedDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        vision = cast("Mapping[str, Any]", context.config.raw["vision_config"])
        self.images: ImageEncoder | PixtralImages | None = None
        if context.encodes("image"):
            make = PixtralImages if vision.get("model_type") == "pixtral" else ImageEncoder
            self.images = make(context, self.outer)
        self.most = 1 if context.is_deterministic else MAX_IMAGES
        read = () if self.images is None else self.images.read
        roots = (f"{self.outer}vision_tower.", f"{self.outer}multi_modal_projector.")
        for name in context.weights.names():  # those of layers behind the one that is read, too
            if name.startswith(roots) and not name.startswith(read):
                context.weights.skip(name)

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of images, ``pixel_values`` [3, size, size] each: [num_patches, hidden_size].

        Pixtral's are of any size, and have ``marks`` [rows]: the token behind each row of patches.
        """
        assert kind == "image"
        assert self.images is not None, "the run takes no images"
        if isinstance(self.images, PixtralImages):
            found = zip(map(self.images, (item["pixel_values"] for item in items)), items, strict=True)
            return [with_marks(rows, self.embedding(item["marks"])) for rows, item in found]
        images = [item["pixel_values"] for item in items]
        batches = [torch.stack(images[i : i + self.most]) for i in range(0, len(images), self.most)]
        return [rows for batch in batches for rows in self.images(batch)]


class PixtralImages:
    """An image of any size to a row for each patch."""

    def __init__(self, context: ModelContext, outer: str) -> None:
        """outer: what names begin with."""
        context = whole(context)
        self.tower = PixtralEncoder(context, f"{outer}vision_tower")
        self.projector = Projector(context, f"{outer}multi_modal_projector", self.tower.hidden)
        self.read = (f"{outer}vision_tower.", f"{outer}multi_modal_projector.")

    def __call__(self, pixels: Tensor) -> Tensor:
        """[channels, height, width] to [num_patches, hidden_size of the decoder]."""
        return self.projector(self.tower(pixels)[0])


class ImageEncoder:
    """Images to rows, by the hidden states before one of the last layers (``vision_feature_layer``)."""

    def __init__(self, context: ModelContext, outer: str) -> None:
        """outer: what names begin with."""
        context = whole(context)
        weights, raw = context.weights, context.config.raw
        sizes = self.sizes = Sizes(raw)
        prefix = f"{outer}vision_tower"
        prefix += ".vision_model" if weights.has(f"{prefix}.vision_model.pre_layrnorm.weight") else ""
        place = (context.device, context.dtype)
        names, hidden = f"{prefix}.embeddings", sizes.hidden
        shape = (hidden, sizes.num_channels, sizes.patch, sizes.patch)
        self.patches = weights.tensor(f"{names}.patch_embedding.weight", shape).to(*place)
        self.first = weights.tensor(f"{names}.class_embedding", (hidden,)).to(*place)
        positions = (sizes.per_side**2 + 1, hidden)
        self.positions = weights.tensor(f"{names}.position_embedding.weight", positions).to(*place)
        self.norm = LayerNorm(context, f"{prefix}.pre_layrnorm", hidden, sizes.eps)
        count = num_layers_before(raw.get("vision_feature_layer", -2), sizes.num_layers)
        self.layers = [EncoderLayer(context, f"{prefix}.encoder.layers.{i}", sizes) for i in range(count)]
        self.drops_first = raw.get("vision_feature_select_strategy", "default") == "default"
        projector = f"{outer}multi_modal_projector"
        self.projector = Projector(context, projector, hidden)
        layers = tuple(f"{prefix}.encoder.layers.{i}." for i in range(count))
        self.read = (*layers, f"{names}.class", f"{names}.patch", f"{names}.position", f"{prefix}.pre_", projector)

    def __call__(self, images: Tensor) -> Tensor:
        """[num_images, channels, size, size] to [num_images, num_patches, hidden_size of the decoder]."""
        x = F.conv2d(images.to(self.patches.dtype), self.patches, stride=self.sizes.patch).flatten(2).transpose(1, 2)
        x = self.norm(torch.cat((self.first.expand(len(x), 1, -1), x), 1) + self.positions)
        for layer in self.layers:
            x = layer(x)
        x = x[:, 1:] if self.drops_first else x
        rows = self.projector(x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:2], -1)
