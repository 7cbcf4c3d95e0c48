"""SigLIP's encoder of images of one size (Zhai et al. 2023, arXiv:2303.15343)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm
from fwk_models._common.vision import EncoderLayer, Sizes

if TYPE_CHECKING:
    from torch import Tensor


class SiglipEncoder:
    """Images to a row for each patch, by as many of its layers as are asked for. Every rank computes all of it."""

    def __init__(self, context: ModelContext, prefix: str, sizes: Sizes, num_layers: int, *, has_norm: bool) -> None:
        """context: ``whole``. prefix: what names begin with. has_norm: the one behind the last layer is applied."""
        weights, place, hidden = context.weights, (context.device, context.dtype), sizes.hidden
        prefix += ".vision_model" if weights.has(f"{prefix}.vision_model.embeddings.patch_embedding.weight") else ""
        names, self.patch = f"{prefix}.embeddings", sizes.patch
        shape = (hidden, sizes.num_channels, sizes.patch, sizes.patch)
        self.patches = weights.tensor(f"{names}.patch_embedding.weight", shape).to(*place)
        self.bias = weights.tensor(f"{names}.patch_embedding.bias", (hidden,)).to(*place)
        self.positions = weights.tensor(f"{names}.position_embedding.weight", (sizes.per_side**2, hidden)).to(*place)
        self.layers = [EncoderLayer(context, f"{prefix}.encoder.layers.{i}", sizes) for i in range(num_layers)]
        self.norm = LayerNorm(context, f"{prefix}.post_layernorm", hidden, sizes.eps) if has_norm else None
        read = (f"{names}.", *(f"{prefix}.encoder.layers.{i}." for i in range(num_layers)))
        read += (f"{prefix}.post_layernorm.",) if has_norm else ()
        for name in weights.names():  # what pools them, and layers behind the one that is read
            if name.startswith(f"{prefix}.") and not name.startswith(read):
                weights.skip(name)

    def __call__(self, images: Tensor) -> Tensor:
        """[num_images, channels, size, size] to [num_images, num_patches, hidden]."""
        x = F.conv2d(images.to(self.patches.dtype), self.patches, self.bias, stride=self.patch)
        x = x.flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.norm(x)
