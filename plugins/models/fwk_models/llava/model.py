"""LLaVA: CLIP's encoder (Radford et al. 2021, arXiv:2103.00020), an MLP, and Llama's decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk.layers import LayerNorm, ReplicatedLinear, activation
from fwk_models._common.llama import LlamaDecoder
from fwk_models._common.vision import EncoderLayer, Sizes, whole

if TYPE_CHECKING:
    from torch import Tensor

MAX_IMAGES = 8
"""Images encoded at once. One, where numbers may not depend on others."""


class Llava(LlamaDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        is_old = context.weights.has("language_model.model.embed_tokens.weight")
        self.root = "language_model.model" if is_old else "model.language_model"
        self.head_name = "language_model.lm_head" if is_old else "lm_head"
        super().__init__(context)
        outer = "" if is_old else "model."
        self.images = ImageEncoder(context, outer) if "image" in context.media else None
        self.most = 1 if context.is_deterministic else MAX_IMAGES
        read = () if self.images is None else self.images.read
        for name in context.weights.names():  # those of layers behind the one that is read, too
            if name.startswith((f"{outer}vision_tower.", f"{outer}multi_modal_projector.")) and not name.startswith(
                read
            ):
                context.weights.skip(name)

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of images, ``pixel_values`` [3, size, size] each: [num_patches, hidden_size]."""
        assert kind == "image"
        assert self.images is not None, "the run takes no images"
        images = [item["pixel_values"] for item in items]
        batches = [torch.stack(images[i : i + self.most]) for i in range(0, len(images), self.most)]
        return [rows for batch in batches for rows in self.images(batch)]


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
        count = _num_layers(raw.get("vision_feature_layer", -2), sizes.num_layers)
        self.layers = [EncoderLayer(context, f"{prefix}.encoder.layers.{i}", sizes) for i in range(count)]
        self.drops_first = raw.get("vision_feature_select_strategy", "default") == "default"
        projector, size = f"{outer}multi_modal_projector", context.config.hidden_size
        bias = bool(raw.get("multimodal_projector_bias", True))
        self.up = ReplicatedLinear(context, f"{projector}.linear_1", hidden, size, bias=bias)
        self.down = ReplicatedLinear(context, f"{projector}.linear_2", size, size, bias=bias)
        self.activation = activation(str(raw.get("projector_hidden_act", "gelu")))
        layers = tuple(f"{prefix}.encoder.layers.{i}." for i in range(count))
        self.read = (*layers, f"{names}.class", f"{names}.patch", f"{names}.position", f"{prefix}.pre_", projector)

    def __call__(self, images: Tensor) -> Tensor:
        """[num_images, channels, size, size] to [num_images, num_patches, hidden_size of the decoder]."""
        x = F.conv2d(images.to(self.patches.dtype), self.patches, stride=self.sizes.patch).flatten(2).transpose(1, 2)
        x = self.norm(torch.cat((self.first.expand(len(x), 1, -1), x), 1) + self.positions)
        for layer in self.layers:
            x = layer(x)
        x = x[:, 1:] if self.drops_first else x
        rows = self.down(self.activation(self.up(x.reshape(-1, x.shape[-1]))))
        return rows.view(*x.shape[:2], -1)


def _num_layers(layer: object, count: int) -> int:
    """How many of ``count`` layers come before the hidden states that ``vision_feature_layer`` names."""
    if not isinstance(layer, int) or not -count - 1 <= layer <= count:
        raise ModelLoadError(f"config.json: 'vision_feature_layer' must name one of the {count} layers, not {layer!r}")
    return layer if layer >= 0 else count + 1 + layer
