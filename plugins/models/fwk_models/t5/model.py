"""T5 (Raffel et al. 2020, arXiv:1910.10683), 1.1 and Flan-T5 (arXiv:2210.11416)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from fwk.interfaces.model import ModelContext
from fwk_layers import (
    ColumnParallelLinear,
    EncoderDecoderStep,
    LMHead,
    Part,
    RMSNorm,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)
from fwk_layers.sharding import output_cut
from fwk_models._common.encoder_decoder import (
    DecoderCrossAttention,
    DecoderSelfAttention,
    EncoderDecoder,
    EncoderSelfAttention,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

NAMES = {"q": "q", "k": "k", "v": "v", "o": "o"}


class T5(EncoderDecoder):
    """Token ids to hidden states to logits. Scores are not scaled, but gain a number by the distance of the tokens."""

    def __init__(self, context: ModelContext) -> None:
        config, raw, weights = context.config, context.config.raw, context.weights
        self.context = context
        self.embedding = VocabEmbedding(context, "shared")
        self.num_buckets = config.integer("relative_attention_num_buckets", 32)
        self.max_distance = config.integer("relative_attention_max_distance", 128)
        num_encoder_layers = config.integer("num_layers", config.num_layers)
        self.encoder_bias = self._biases("encoder")
        behind = torch.arange(self.max_distance + 1)
        extras = {"distance_bias": self._biases("decoder")[:, self._buckets(behind, self.num_buckets)].contiguous()}
        self.encoder = [EncoderLayer(context, f"encoder.block.{index}.layer") for index in range(num_encoder_layers)]
        self.encoder_norm = RMSNorm(context, "encoder.final_layer_norm", config.hidden_size, config.rms_norm_eps)
        self.decoder = [
            DecoderLayer(context, f"decoder.block.{index}.layer", extras) for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(context, "decoder.final_layer_norm", config.hidden_size, config.rms_norm_eps)
        self.cross = [layer.cross.attention for layer in self.decoder]
        is_tied = config.tie_word_embeddings
        self.scale = config.hidden_size**-0.5 if raw["scale_decoder_outputs"] else 1.0
        self.head = LMHead(context, "lm_head", self.embedding if is_tied else None, is_final=True)
        unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", unused):
            weights.skip(name)

    def encode_prompts(self, batch: ForwardBatch) -> Tensor:
        x = self.embedding(batch.token_ids)
        bias = {int(n): self._bias_between(int(n)).to(x.dtype) for n in np.unique(batch.seq_lens_np)}
        for layer in self.encoder:
            x = layer(x, batch, bias)
        return self.encoder_norm(x)

    def decode(self, encoded: Tensor | None, step: EncoderDecoderStep) -> Tensor:
        x = self.embedding(step.decoder.token_ids)
        for layer in self.decoder:
            x = layer(x, encoded, step)
        return self.norm(x) * self.scale

    def _biases(self, side: str) -> Tensor:
        """[num_heads, num_buckets] float32, of this rank's heads."""
        context, heads = self.context, self.context.config.num_heads
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        whole = context.weights.tensor(name, (self.num_buckets, heads)).float()
        return (
            output_cut(Part(name, heads, heads), context.tp).cut(whole.t(), 0, 1, name).contiguous().to(context.device)
        )

    def _bias_between(self, length: int) -> Tensor:
        """[num_heads, length, length] for all pairs of a prompt's tokens: those ahead have buckets of their own."""
        at = torch.arange(length)
        ahead = at[None] - at[:, None]  # of the query
        half = self.num_buckets // 2
        found = self._buckets(ahead.abs(), half) + (ahead > 0) * half
        return self.encoder_bias[:, found.to(self.encoder_bias.device)]

    def _buckets(self, distances: Tensor, count: int) -> Tensor:
        """Half of the buckets hold a distance each, the others ever longer stretches up to ``max_distance``."""
        exact = count // 2
        ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return torch.where(distances < exact, distances, far)


class FeedForward:
    """down(activation(up(x))), or with a gate; ``feed_forward_proj`` says which."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        config = context.config
        word = str(config.raw.get("feed_forward_proj") or "relu")
        self.is_gated, name = word.startswith("gated-"), word.removeprefix("gated-")
        self.activation = activation("gelu_new" if word == "gated-gelu" else name)
        inner, hidden = config.intermediate_size, config.hidden_size
        names = ("wi_0", "wi_1") if self.is_gated else ("wi",)
        self.up = ColumnParallelLinear(context, [Part(f"{prefix}.{x}", inner) for x in names], hidden)
        self.down = RowParallelLinear(context, f"{prefix}.wo", inner, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden_size] to the same."""
        up = self.up(x)
        if not self.is_gated:
            return self.down(self.activation(up))
        gate, up = up.chunk(2, -1)
        return self.down(self.activation(gate) * up)


class EncoderLayer:
    """Attention and a feed-forward network, each with a norm before it."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        self.attention = EncoderSelfAttention(context, f"{prefix}.0.SelfAttention", NAMES, scale=1.0)
        self.mlp = FeedForward(context, f"{prefix}.1.DenseReluDense")
        self.norms = norms(context, prefix, 2)

    def __call__(self, x: Tensor, batch: ForwardBatch, bias: dict[int, Tensor]) -> Tensor:
        """[num_encoded, hidden_size] to the same."""
        x = x + self.attention.attend(self.norms[0](x), batch, bias)
        return x + self.mlp(self.norms[1](x))


class DecoderLayer:
    """The same with attention to the prompt between the two."""

    def __init__(self, context: ModelContext, prefix: str, extras: dict[str, Tensor]) -> None:
        self.own = DecoderSelfAttention(context, f"{prefix}.0.SelfAttention", NAMES, scale=1.0, extras=extras)
        self.cross = DecoderCrossAttention(context, f"{prefix}.1.EncDecAttention", NAMES, self.own, scale=1.0)
        self.mlp = FeedForward(context, f"{prefix}.2.DenseReluDense")
        self.norms = norms(context, prefix, 3)

    def __call__(self, x: Tensor, encoded: Tensor | None, step: EncoderDecoderStep) -> Tensor:
        """[num_decoded, hidden_size] to the same."""
        x = x + self.own.attend(self.norms[0](x), step)
        x = x + self.cross.attend(self.norms[1](x), encoded, step)
        return x + self.mlp(self.norms[2](x))


def norms(context: ModelContext, prefix: str, count: int) -> list[RMSNorm]:
    """Those before the parts of a layer."""
    size, eps = context.config.hidden_size, context.config.rms_norm_eps
    return [RMSNorm(context, f"{prefix}.{index}.layer_norm", size, eps) for index in range(count)]
