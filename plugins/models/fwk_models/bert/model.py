"""BERT (Devlin et al. 2018, arXiv:1810.04805) and what is made of it: RoBERTa, classifiers, ColBERT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from fwk.errors import ModelLoadError
from fwk.interfaces.model import Encoder, ModelContext
from fwk_layers import (
    ColumnParallelLinear,
    EncoderAttention,
    LayerNorm,
    Part,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class Bert(Encoder):
    """Token ids to hidden states. Tokens are of the first segment, those of a pair's second text of the second.

    root: what names begin with in a checkpoint that was written with a head.
    """

    root = "bert."

    def __init__(self, context: ModelContext) -> None:
        root = self.root if context.weights.has(f"{self.root}embeddings.word_embeddings.weight") else ""
        config, raw = context.config, context.config.raw
        if raw.get("position_embedding_type", "absolute") != "absolute" or raw.get("is_decoder"):
            raise ModelLoadError(
                "bert: only encoders with absolute positions are computed; config.json has "
                f"position_embedding_type {raw.get('position_embedding_type')!r}, is_decoder {raw.get('is_decoder')!r}"
            )
        hidden, place = config.hidden_size, (context.device, context.dtype)
        embeddings = f"{root}embeddings"
        self.words = VocabEmbedding(context, f"{embeddings}.word_embeddings")
        offset = int(raw.get("position_offset", 0))
        shape = (config.max_position_embeddings + offset, hidden)
        positions = context.weights.tensor(f"{embeddings}.position_embeddings.weight", shape)[offset:].to(*place)
        kinds = (int(raw.get("type_vocab_size") or 2), hidden)
        segments = context.weights.tensor(f"{embeddings}.token_type_embeddings.weight", kinds).to(*place)
        self.positions = positions + segments[0]  # what the second segment is apart from the first is added to it
        self.second_segment = segments[1] - segments[0] if kinds[0] > 1 else None
        self.norm = LayerNorm(context, f"{embeddings}.LayerNorm", hidden, epsilon(context))
        self.layers = [BertLayer(context, f"{root}encoder.layer.{index}") for index in range(config.num_layers)]
        for name in ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"):
            context.weights.skip(f"{root}{name}")

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.words(batch.token_ids) + self.positions.index_select(0, batch.positions)
        starts = batch.extras.get("segment_start", ())
        if self.second_segment is not None and any(starts):
            for i, start in enumerate(starts):
                if start:
                    x[int(batch.query_start_np[i]) + start : int(batch.query_start_np[i + 1])] += self.second_segment
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, batch)
        return x


class BertClassifier(Bert):
    """A tanh layer over the first token's hidden state, then a linear one to the labels."""

    dense, output = "bert.pooler.dense", "classifier"

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        hidden = context.config.hidden_size
        self.inner = plain_linear(context, self.dense, hidden, hidden)
        self.scores = plain_linear(context, self.output, len(context.config.labels), hidden)

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        first = hidden.index_select(0, batch.query_start[:-1].long())
        return F.linear(torch.tanh(F.linear(first, *self.inner)), *self.scores).float()


class RobertaClassifier(BertClassifier):
    """The same, named otherwise."""

    root, dense, output = "roberta.", "classifier.dense", "classifier.out_proj"


class ColBERT(Bert):
    """ColBERT (Khattab and Zaharia 2020, arXiv:2004.12832): each token's hidden state, made shorter, of length one."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        shape = (context.config.integer("dim", 128), context.config.hidden_size)
        self.shorter = context.weights.tensor("linear.weight", shape).to(context.device, context.dtype)

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Sequence[Tensor]:
        vectors = F.normalize(F.linear(hidden, self.shorter).float(), dim=-1)
        return vectors.split(np.diff(batch.query_start_np).tolist())


def plain_linear(context: ModelContext, prefix: str, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of a small layer that is not quantised."""
    weight = context.weights.tensor(f"{prefix}.weight", (out_features, in_features))
    bias = context.weights.tensor(f"{prefix}.bias", (out_features,))
    return weight.to(context.device, context.dtype), bias.to(context.device, context.dtype)


class BertLayer:
    """Attention and a feed-forward network, each added to its input and then normalised."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        config = context.config
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
        parts = [
            Part(f"{prefix}.attention.self.{name}", config.num_heads * size, config.num_heads)
            for name in ("query", "key", "value")
        ]
        self.qkv = ColumnParallelLinear(context, parts, hidden, bias=True)
        self.head_size, self.num_heads = size, self.qkv.out_features[0] // size
        self.attention = EncoderAttention(size)
        output = f"{prefix}.attention.output"
        self.output = RowParallelLinear(
            context, f"{output}.dense", config.num_heads * size, hidden, num_units=config.num_heads, bias=True
        )
        self.output_norm = LayerNorm(context, f"{output}.LayerNorm", hidden, epsilon(context))
        self.up = ColumnParallelLinear(context, [Part(f"{prefix}.intermediate.dense", inner)], hidden, bias=True)
        self.activation = activation(str(config.raw.get("hidden_act", "gelu")))
        self.down = RowParallelLinear(context, f"{prefix}.output.dense", inner, hidden, bias=True)
        self.down_norm = LayerNorm(context, f"{prefix}.output.LayerNorm", hidden, epsilon(context))

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size).unbind(1)
        x = self.output_norm(x + self.output(self.attention(q, k, v, batch)))
        return self.down_norm(x + self.down(self.activation(self.up(x))))


def epsilon(context: ModelContext) -> float:
    """What layer norms add to the variance."""
    return float(context.config.raw.get("layer_norm_eps", 1e-12))
