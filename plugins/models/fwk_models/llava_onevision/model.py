"""LLaVA-OneVision: the whole image, and behind it its tiles as one picture, each row of which has an end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.interfaces.model import ModelContext
from fwk_models._common.nested_text import NestedDecoder
from fwk_models._common.pixtral import with_marks
from fwk_models._common.projector import Projector
from fwk_models._common.siglip import SiglipEncoder
from fwk_models._common.vision import Sizes, num_layers_before, whole

if TYPE_CHECKING:
    from torch import Tensor

MAX_TILES = 8
"""Tiles encoded at once. One, where numbers may not depend on others."""


class OneVision(NestedDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.images = ImageEncoder(context, self.outer) if context.encodes("image") else None
        if self.images is None:
            self.skip(context, "vision_tower.", "multi_modal_projector.", "image_newline")

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of images, ``pixel_values`` [1 + num_tiles, 3, size, size], ``grid``, ``shown`` and ``scaled``.

        grid: rows and columns of tiles. shown: the first row and column of their patches that is no padding, and how
        many rows and columns are none. scaled: how many rows and columns those become.
        [num_patches + rows * (columns + 1), hidden_size] each. One after another: they are of different sizes.
        """
        assert kind == "image"
        assert self.images is not None, "the run takes no images"
        names = ("grid", "shown", "scaled")
        return [self.images(item["pixel_values"], *(item[name].tolist() for name in names)) for item in items]


class ImageEncoder:
    """Tiles to rows by SigLIP and two layers, put together."""

    def __init__(self, context: ModelContext, outer: str) -> None:
        """outer: what names begin with."""
        self.most = 1 if context.is_deterministic else MAX_TILES
        context = whole(context)
        sizes, raw = Sizes(context.config.raw), context.config.raw
        count = num_layers_before(raw.get("vision_feature_layer", -1), sizes.num_layers)
        self.per_side = sizes.per_side
        self.tower = SiglipEncoder(context, f"{outer}vision_tower", sizes, count, has_norm=False)
        self.projector = Projector(context, f"{outer}multi_modal_projector", sizes.hidden)
        newline = context.weights.tensor(f"{outer}image_newline", (context.config.hidden_size,))
        self.newline = newline.to(context.device, context.dtype)

    def __call__(self, tiles: Tensor, grid: list[int], shown: list[int], scaled: list[int]) -> Tensor:
        """[1 + rows * columns, channels, size, size] to rows; see ``OneVision.encode``."""
        batches = [self.tower(tiles[i : i + self.most]) for i in range(0, len(tiles), self.most)]
        x = torch.cat(batches)  # [num_tiles, num_patches, hidden]
        x = self.projector(x.flatten(0, 1)).view(*x.shape[:2], -1)
        side, (rows, columns) = self.per_side, grid
        picture = x[1:].view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        top, left, height, width = shown
        picture = picture[top : top + height, left : left + width].permute(2, 0, 1)
        if [height, width] != scaled:
            picture = F.interpolate(picture[None], scaled, mode="bilinear")[0]
        lines = picture.flatten(1).T
        return torch.cat((x[0], with_marks(lines, self.newline.expand(scaled[0], -1))))
