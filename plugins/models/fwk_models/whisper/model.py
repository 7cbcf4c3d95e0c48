"""Whisper (Radford et al. 2022, arXiv:2212.04356): spectrograms to rows that a decoder reads by cross-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

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
from fwk_models._common.encoder_decoder import DecoderCrossAttention, DecoderSelfAttention, EncoderDecoder
from fwk_models._common.sound import EPS, SoundEncoder
from fwk_models._common.vision import whole

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
BIASED = frozenset("qvo")
"""Keys have no bias."""


class Whisper(EncoderDecoder):
    """The rows of a window of sound, and token ids, to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, place = context.config, (context.device, context.dtype)
        self.context, self.size = context, config.hidden_size
        self.encoder = SoundEncoder(context, "model.encoder", config.raw) if context.encodes("audio") else None
        if self.encoder is not None:
            self.encoder_norm = norm(whole(context), "model.encoder.layer_norm")
        for name in context.weights.names() if "audio" in context.media and self.encoder is None else ():
            if name.startswith("model.encoder."):
                context.weights.skip(name)
        self.embedding = VocabEmbedding(context, "model.decoder.embed_tokens")
        shape = (config.integer("max_target_positions"), self.size)
        self.positions = context.weights.tensor("model.decoder.embed_positions.weight", shape).to(*place)
        self.decoder = [DecoderLayer(context, f"model.decoder.layers.{index}") for index in range(config.num_layers)]
        self.norm = norm(context, "model.decoder.layer_norm")
        self.cross = [layer.cross.attention for layer in self.decoder]
        self.head = LMHead(context, "proj_out", self.embedding if config.tie_word_embeddings else None, is_final=True)

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of windows of sound, ``spectrogram`` [num_bins, 2 * n] each: [n, hidden_size]."""
        assert kind == "audio"
        assert self.encoder is not None, "the run takes no sounds"
        return [self.encoder_norm(self.encoder(item["spectrogram"])) for item in items]

    def encode_prompts(self, batch: ForwardBatch) -> Tensor:
        """The rows of the windows that start, which ``encode`` has made; zeros in a step that warms up."""
        if batch.inserted is not None:
            return batch.inserted.values
        return torch.zeros(len(batch.token_ids), self.size, dtype=self.context.dtype, device=batch.token_ids.device)

    def decode(self, encoded: Tensor | None, step: EncoderDecoderStep) -> Tensor:
        x = self.embedding(step.decoder.token_ids) + self.positions.index_select(0, step.decoder.positions)
        for layer in self.decoder:
            x = layer(x, encoded, step)
        return self.norm(x)


class DecoderLayer:
    """Attention to the text so far, to the sound, and a feed-forward network, each on the normalised stream."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        hidden, inner = context.config.hidden_size, context.config.integer("decoder_ffn_dim")
        self.own_norm = norm(context, f"{prefix}.self_attn_layer_norm")
        self.own = DecoderSelfAttention(context, f"{prefix}.self_attn", NAMES, bias=BIASED)
        self.cross_norm = norm(context, f"{prefix}.encoder_attn_layer_norm")
        self.cross = DecoderCrossAttention(context, f"{prefix}.encoder_attn", NAMES, self.own, bias=BIASED)
        self.final_norm = norm(context, f"{prefix}.final_layer_norm")
        self.up = ColumnParallelLinear(context, [Part(f"{prefix}.fc1", inner)], hidden, bias=True)
        self.down = RowParallelLinear(context, f"{prefix}.fc2", inner, hidden, bias=True)
        self.activation = activation(str(context.config.raw["activation_function"]))

    def __call__(self, x: Tensor, encoded: Tensor | None, step: EncoderDecoderStep) -> Tensor:
        """[num_decoded, hidden_size] to the same."""
        x = x + self.own.attend(self.own_norm(x), step)
        x = x + self.cross.attend(self.cross_norm(x), encoded, step)
        return x + self.down(self.activation(self.up(self.final_norm(x))))


def norm(context: ModelContext, prefix: str) -> LayerNorm:
    """A layer norm as wide as the model."""
    return LayerNorm(context, prefix, context.config.hidden_size, EPS)
