"""Encoders of images: transformers over patches, as CLIP's and SigLIP's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk.interfaces.parallel import SingleRank
from fwk_layers import ColumnParallelLinear, LayerNorm, Part, ReplicatedLinear, activation

if TYPE_CHECKING:
    from torch import Tensor


def whole(context: ModelContext) -> ModelContext:
    """For an encoder that every rank computes whole, and that adapters leave as it is."""
    return replace(context, tp=SingleRank(), lora=None)


class Sizes:
    """The fields of ``vision_config``, which is complete."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        vision = cast("dict[str, Any]", raw["vision_config"])

        def integer(name: str) -> int:
            value = vision.get(name)
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"config.json: vision_config's {name!r} must be a whole number, not {value!r}")
            return value

        self.hidden = integer("hidden_size")
        self.inner = integer("intermediate_size")
        self.num_layers = integer("num_hidden_layers")
        self.num_heads = integer("num_attention_heads")
        self.num_channels = integer("num_channels")
        self.patch = integer("patch_size")
        self.per_side = integer("image_size") // self.patch
        self.eps = float(vision["layer_norm_eps"])
        self.activation = str(vision["hidden_act"])
        if self.hidden % self.num_heads:
            raise ModelLoadError("config.json: vision_config's 'hidden_size' is no multiple of 'num_attention_heads'")


class EncoderLayer:
    """Attention among all patches of an image and an MLP, each on the normalised stream."""

    def __init__(self, context: ModelContext, prefix: str, sizes: Sizes) -> None:
        hidden = sizes.hidden
        self.num_heads, self.activation = sizes.num_heads, activation(sizes.activation)
        self.norms = [LayerNorm(context, f"{prefix}.layer_norm{i}", hidden, sizes.eps) for i in (1, 2)]
        parts = [Part(f"{prefix}.self_attn.{name}_proj", hidden) for name in "qkv"]
        self.qkv = ColumnParallelLinear(context, parts, hidden, bias=True)
        self.output = ReplicatedLinear(context, f"{prefix}.self_attn.out_proj", hidden, hidden, bias=True)
        self.up = ReplicatedLinear(context, f"{prefix}.mlp.fc1", hidden, sizes.inner, bias=True)
        self.down = ReplicatedLinear(context, f"{prefix}.mlp.fc2", sizes.inner, hidden, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_images, num_patches, size] to the same."""
        x = x + self._attended(self.norms[0](x))
        rows = self.norms[1](x).flatten(0, 1)
        return x + self.down(self.activation(self.up(rows))).view_as(x)

    def _attended(self, x: Tensor) -> Tensor:
        num_images, num_patches, size = x.shape
        qkv = self.qkv(x.reshape(-1, size)).view(num_images, num_patches, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.output(attended.reshape(-1, size)).view_as(x)


def num_layers_before(layer: object, count: int) -> int:
    """How many of ``count`` layers come before the hidden states that ``vision_feature_layer`` names."""
    if not isinstance(layer, int) or not -count - 1 <= layer <= count:
        raise ModelLoadError(f"config.json: 'vision_feature_layer' must name one of the {count} layers, not {layer!r}")
    return layer if layer >= 0 else count + 1 + layer
