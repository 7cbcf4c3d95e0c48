"""Idefics3: SigLIP's encoder (Zhai et al. 2023, arXiv:2303.15343), a connector, and Llama's decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk.interfaces.parallel import SingleRank
from fwk.layers import ColumnParallelLinear, LayerNorm, Part, ReplicatedLinear, activation
from fwk_models._common.llama import LlamaDecoder

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
        self.images = ImageEncoder(context) if "image" in context.media else None
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


class Sizes:
    """The fields of ``vision_config``, with the defaults of transformers' configuration."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        vision = cast("Mapping[str, Any]", raw["vision_config"])

        def integer(name: str, default: int) -> int:
            value = vision.get(name, default)
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"config.json: vision_config's {name!r} must be a whole number, not {value!r}")
            return value

        self.hidden = integer("hidden_size", 1152)
        self.inner = integer("intermediate_size", 3072)
        self.num_layers = integer("num_hidden_layers", 12)
        self.num_heads = integer("num_attention_heads", 16)
        self.num_channels = integer("num_channels", 3)
        self.patch = integer("patch_size", 32)
        self.per_side = integer("image_size", 224) // self.patch
        self.eps = float(vision.get("layer_norm_eps", 1e-6))
        self.activation = str(vision.get("hidden_act", "gelu_pytorch_tanh"))
        self.scale = raw.get("scale_factor", 2)
        if self.hidden % self.num_heads:
            raise ModelLoadError("config.json: vision_config's 'hidden_size' is no multiple of 'num_attention_heads'")
        if not isinstance(self.scale, int) or self.scale < 1:
            raise ModelLoadError(f"config.json: 'scale_factor' must be a whole number, not {self.scale!r}")


class ImageEncoder:
    """Tiles to rows. Every rank computes all of it, and adapters leave it as it is."""

    def __init__(self, context: ModelContext) -> None:
        context = replace(context, tp=SingleRank(), lora=None)
        sizes = self.sizes = Sizes(context.config.raw)
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
        self.projection = ReplicatedLinear(context, name, sizes.hidden * sizes.scale**2, context.config.hidden_size)

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
        scale, side = self.sizes.scale, round(x.shape[1] ** 0.5)
        x = x.view(x.shape[0], side // scale, scale, side // scale, scale, x.shape[2])
        return x.transpose(2, 3).reshape(x.shape[0], (side // scale) ** 2, -1)


class EncoderLayer:
    """Attention among all patches of a tile and an MLP, each on the normalised stream."""

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
        """[num_tiles, num_patches, size] to the same."""
        x = x + self._attended(self.norms[0](x))
        rows = self.norms[1](x).flatten(0, 1)
        return x + self.down(self.activation(self.up(rows))).view_as(x)

    def _attended(self, x: Tensor) -> Tensor:
        num_tiles, num_patches, size = x.shape
        qkv = self.qkv(x.reshape(-1, size)).view(num_tiles, num_patches, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.output(attended.reshape(-1, size)).view_as(x)
