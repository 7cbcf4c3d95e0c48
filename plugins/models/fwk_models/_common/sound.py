"""Whisper's encoder of spectrograms (Radford et al. 2022, arXiv:2212.04356)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, ReplicatedLinear, activation
from fwk_models._common.vision import whole

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5


def integer(ears: Mapping[str, Any], name: str) -> int:
    """A size of the encoder's config. Raises ``ModelLoadError``."""
    value = ears.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**20:
        raise ModelLoadError(f"config.json: the sound encoder's {name!r} must be a whole number, not {value!r}")
    return value


class SoundEncoder:
    """A spectrogram to a row for each two of its frames. Every rank computes all of it, and adapters leave it so."""

    def __init__(self, context: ModelContext, root: str, ears: Mapping[str, Any]) -> None:
        context = whole(context)
        weights, place = context.weights, (context.device, context.dtype)
        self.size = integer(ears, "d_model")
        bins, heads = integer(ears, "num_mel_bins"), integer(ears, "encoder_attention_heads")
        if self.size % heads:
            raise ModelLoadError("config.json: the sound encoder's 'd_model' is no multiple of its heads")
        self.convolutions = [
            (
                weights.tensor(f"{root}.conv{i}.weight", (self.size, size, 3)).to(*place),
                weights.tensor(f"{root}.conv{i}.bias", (self.size,)).to(*place),
            )
            for i, size in ((1, bins), (2, self.size))
        ]
        shape = (integer(ears, "max_source_positions"), self.size)
        self.positions = weights.tensor(f"{root}.embed_positions.weight", shape).to(*place)
        self.layers = [
            _Layer(context, f"{root}.layers.{index}", self.size, heads, ears)
            for index in range(integer(ears, "encoder_layers"))
        ]

    def __call__(self, spectrogram: Tensor) -> Tensor:
        """[num_bins, 2 * n + 1] to [n, size], before the norm behind the last layer; n is at most its positions.

        The frame behind the last one is a neighbour alone; there is none behind as many as there may be (2 * n).
        """
        count = spectrogram.shape[1] // 2
        (first, first_bias), (second, second_bias) = self.convolutions
        x = F.gelu(F.conv1d(spectrogram.to(first.dtype), first, first_bias, padding=1))[:, : 2 * count]
        x = F.gelu(F.conv1d(x, second, second_bias, stride=2, padding=1)).T + self.positions[:count]
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer:
    """Attention among all rows and an MLP, each on the normalised stream; keys have no bias."""

    def __init__(self, context: ModelContext, prefix: str, size: int, heads: int, ears: Mapping[str, Any]) -> None:
        self.heads, inner = heads, integer(ears, "encoder_ffn_dim")
        self.activation = activation(str(ears["activation_function"]))
        self.norms = [LayerNorm(context, f"{prefix}.{name}", size, EPS)
                      for name in ("self_attn_layer_norm", "final_layer_norm")]  # fmt: skip
        self.inner = [ReplicatedLinear(context, f"{prefix}.self_attn.{name}_proj", size, size, bias=name != "k")
                      for name in "qkv"]  # fmt: skip
        self.output = ReplicatedLinear(context, f"{prefix}.self_attn.out_proj", size, size, bias=True)
        self.up = ReplicatedLinear(context, f"{prefix}.fc1", size, inner, bias=True)
        self.down = ReplicatedLinear(context, f"{prefix}.fc2", inner, size, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, size] to the same."""
        rows = self.norms[0](x)
        q, k, v = (linear(rows).view(len(x), self.heads, -1).transpose(0, 1) for linear in self.inner)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.output(attended.transpose(0, 1).reshape(len(x), -1))
        return x + self.down(self.activation(self.up(self.norms[1](x))))


def pairs(x: Tensor) -> Tensor:
    """The mean of each two rows, without a last one that is alone: [n, size] to [n / 2, size]."""
    return torch.stack((x[:-1:2], x[1::2])).mean(0) if len(x) > 1 else x[:0]
