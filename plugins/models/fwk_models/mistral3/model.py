"""Mistral 3: images to rows by Pixtral's encoder (arXiv:2410.07073); each row of an image ends with a token's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F

from fwk.interfaces.model import ModelContext
from fwk_layers import ReplicatedLinear, RMSNorm, activation
from fwk_models._common.nested_text import NestedDecoder
from fwk_models._common.pixtral import PixtralEncoder, with_marks
from fwk_models._common.vision import whole

if TYPE_CHECKING:
    from torch import Tensor


class Mistral3(NestedDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.images = ImageEncoder(context, self.outer) if context.encodes("image") else None
        if self.images is None:
            self.skip(context, "vision_tower.", "multi_modal_projector.")

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of images, ``pixel_values`` [3, height, width] and ``marks`` [rows], the token behind each row of the image.

        [rows * (columns + 1), hidden_size] each. One after another: they are of different sizes.
        """
        assert kind == "image"
        assert self.images is not None, "the run takes no images"
        return [with_marks(self.images(item["pixel_values"]), self.embedding(item["marks"])) for item in items]


class ImageEncoder:
    """Pixtral's rows, each square of which is merged and projected. Adapters leave it as it is."""

    def __init__(self, context: ModelContext, outer: str) -> None:
        """outer: what names begin with."""
        context = whole(context)
        raw, projector, size = context.config.raw, f"{outer}multi_modal_projector", context.config.hidden_size
        self.tower, self.merge = PixtralEncoder(context, f"{outer}vision_tower"), int(raw.get("spatial_merge_size", 2))
        hidden = self.tower.hidden
        self.norm = RMSNorm(context, f"{projector}.norm", hidden, context.config.rms_norm_eps)
        merged, bias = hidden * self.merge**2, bool(raw.get("multimodal_projector_bias", False))
        self.merger = ReplicatedLinear(context, f"{projector}.patch_merger.merging_layer", merged, hidden)
        self.up = ReplicatedLinear(context, f"{projector}.linear_1", hidden, size, bias=bias)
        self.down = ReplicatedLinear(context, f"{projector}.linear_2", size, size, bias=bias)
        self.activation = activation(str(raw.get("projector_hidden_act", "gelu")))

    def __call__(self, pixels: Tensor) -> Tensor:
        """[channels, height, width] to [height * width / (patch * merge)^2, hidden_size of the decoder]."""
        x, rows, columns = self.tower(pixels)
        x = self.norm(x).T.view(1, -1, rows, columns)
        x = self.merger(F.unfold(x, self.merge, stride=self.merge)[0].T)  # a square's patches, column by column
        return self.down(self.activation(self.up(x)))
