"""BERT (Devlin et al. 2018, arXiv:1810.04805), as a transformer that reads top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import Encoder, ModelContext
from fwk.layers import (
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
    """Token ids to hidden states. All tokens are of the first segment; the pooler's layer is not asked."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        if raw.get("position_embedding_type", "absolute") != "absolute" or raw.get("is_decoder"):
            raise ModelLoadError(
                "bert: only encoders with absolute positions are computed; config.json has "
                f"position_embedding_type {raw.get('position_embedding_type')!r}, is_decoder {raw.get('is_decoder')!r}"
            )
        hidden, place = config.hidden_size, (context.device, context.dtype)
        self.words = VocabEmbedding(context, "embeddings.word_embeddings")
        shape = (config.max_position_embeddings, hidden)
        self.positions = context.weights.tensor("embeddings.position_embeddings.weight", shape).to(*place)
        kinds = (int(raw.get("type_vocab_size") or 2), hidden)
        # Every token has the same segment: its row goes into the positions', once.
        self.positions = self.positions + context.weights.tensor("embeddings.token_type_embeddings.weight", kinds)[
            0
        ].to(*place)
        self.norm = LayerNorm(context, "embeddings.LayerNorm", hidden, epsilon(context))
        self.layers = [BertLayer(context, f"encoder.layer.{index}") for index in range(config.num_layers)]
        for name in ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"):
            context.weights.skip(name)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.norm(self.words(batch.token_ids) + self.positions.index_select(0, batch.positions))
        for layer in self.layers:
            x = layer(x, batch)
        return x


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
