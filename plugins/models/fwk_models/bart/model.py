"""BART (Lewis et al. 2020, arXiv:1910.13461)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import (
    ColumnParallelLinear,
    EncoderDecoderStep,
    LayerNorm,
    LMHead,
    Part,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)
from fwk_models._common.encoder_decoder import (
    ALL,
    DecoderCrossAttention,
    DecoderSelfAttention,
    EncoderDecoder,
    EncoderSelfAttention,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
FIRST_POSITION = 2
"""Rows of the tables of positions that no token uses."""


class Bart(EncoderDecoder):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, weights = context.config, context.weights
        self.context = context
        scale = math.sqrt(config.hidden_size) if config.raw.get("scale_embedding") else None
        self.embedding = VocabEmbedding(context, "model.shared", scale=scale)
        num_encoder_layers = config.integer("encoder_layers", config.num_layers)
        self.starts = [Start(context, f"model.{side}") for side in ("encoder", "decoder")]
        self.encoder = [EncoderLayer(context, f"model.encoder.layers.{index}") for index in range(num_encoder_layers)]
        self.decoder = [DecoderLayer(context, f"model.decoder.layers.{index}") for index in range(config.num_layers)]
        self.cross = [layer.cross.attention for layer in self.decoder]
        self.head = LMHead(context, "lm_head", self.embedding if config.tie_word_embeddings else None)
        bias = "final_logits_bias"
        self.bias = weights.tensor(bias, (1, config.vocab_size)).to(context.device) if weights.has(bias) else None
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            weights.skip(f"model.{name}")

    def encode_prompts(self, batch: ForwardBatch) -> Tensor:
        x = self.starts[0](self.embedding(batch.token_ids), batch)
        for layer in self.encoder:
            x = layer(x, batch)
        return x

    def decode(self, encoded: Tensor | None, step: EncoderDecoderStep) -> Tensor:
        x = self.starts[1](self.embedding(step.decoder.token_ids), step.decoder)
        for layer in self.decoder:
            x = layer(x, encoded, step)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)


class Start:
    """Positions and a norm behind the embedding."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        shape = (context.config.max_position_embeddings + FIRST_POSITION, context.config.hidden_size)
        positions = context.weights.tensor(f"{prefix}.embed_positions.weight", shape)[FIRST_POSITION:]
        self.positions = positions.to(context.device, context.dtype)
        self.norm = norm(context, f"{prefix}.layernorm_embedding")

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[n, hidden_size] to the same."""
        return self.norm(x + self.positions.index_select(0, batch.positions))


class FeedForward:
    """down(activation(up(x))), added to its input and normalised."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        side = "encoder" if ".encoder." in prefix else "decoder"
        inner, hidden = context.config.integer(f"{side}_ffn_dim"), context.config.hidden_size
        self.up = ColumnParallelLinear(context, [Part(f"{prefix}.fc1", inner)], hidden, bias=True)
        self.down = RowParallelLinear(context, f"{prefix}.fc2", inner, hidden, bias=True)
        self.activation = activation(str(context.config.raw.get("activation_function") or "gelu"))
        self.norm = norm(context, f"{prefix}.final_layer_norm")

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden_size] to the same."""
        return self.norm(x + self.down(self.activation(self.up(x))))


class EncoderLayer:
    """Attention and a feed-forward network, each added to its input and then normalised."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        self.attention = EncoderSelfAttention(context, f"{prefix}.self_attn", NAMES, bias=ALL)
        self.norm = norm(context, f"{prefix}.self_attn_layer_norm")
        self.mlp = FeedForward(context, prefix)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[num_encoded, hidden_size] to the same."""
        return self.mlp(self.norm(x + self.attention.attend(x, batch)))


class DecoderLayer:
    """The same with attention to the prompt between the two."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        self.own = DecoderSelfAttention(context, f"{prefix}.self_attn", NAMES, bias=ALL)
        self.own_norm = norm(context, f"{prefix}.self_attn_layer_norm")
        self.cross = DecoderCrossAttention(context, f"{prefix}.encoder_attn", NAMES, self.own, bias=ALL)
        self.cross_norm = norm(context, f"{prefix}.encoder_attn_layer_norm")
        self.mlp = FeedForward(context, prefix)

    def __call__(self, x: Tensor, encoded: Tensor | None, step: EncoderDecoderStep) -> Tensor:
        """[num_decoded, hidden_size] to the same."""
        x = self.own_norm(x + self.own.attend(x, step))
        return self.mlp(self.cross_norm(x + self.cross.attend(x, encoded, step)))


def norm(context: ModelContext, prefix: str) -> LayerNorm:
    """A layer norm as wide as the model."""
    return LayerNorm(context, prefix, context.config.hidden_size, 1e-5)
