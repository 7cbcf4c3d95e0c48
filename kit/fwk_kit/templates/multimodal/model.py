"""A decoder of attention alone that takes grey pictures: a row of a table for each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fwk.interfaces.model import Model, ModelContext
from fwk_layers import (
    Attention,
    LMHead,
    QKVLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabEmbedding,
    insert,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class MineModel(Model):
    """``encode`` makes the rows; ``insert`` puts them where their tokens are."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self.embedding = VocabEmbedding(context, "model.embed_tokens")
        self.greys = context.weights.tensor("model.greys.weight", (256, config.hidden_size))
        self.greys = self.greys.to(context.device, context.dtype)
        self.rotary = RotaryEmbedding(context)
        self.layers = [Layer(context, self.rotary, f"model.layers.{index}") for index in range(config.num_layers)]
        self.norm = RMSNorm(context, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = LMHead(context, "lm_head", self.embedding if config.tie_word_embeddings else None)

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        return [self.greys[item["points"].long()] for item in items]

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = insert(self.embedding(batch.token_ids), batch)
        for layer in self.layers:
            x = x + layer(x, batch)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Layer:
    """Attention on the normalised stream."""

    def __init__(self, context: ModelContext, rotary: RotaryEmbedding, prefix: str) -> None:
        config = context.config
        self.rotary, self.head_size = rotary, config.head_size
        self.norm = RMSNorm(context, f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.qkv = QKVLinear(context, f"{prefix}.self_attn")
        self.heads = (self.qkv.num_heads, self.qkv.num_kv_heads, self.qkv.num_kv_heads)
        self.attention = Attention(context, self.heads[0], self.heads[1])
        size, name = config.num_heads * config.head_size, f"{prefix}.self_attn.o_proj"
        self.output = RowParallelLinear(context, name, size, config.hidden_size, num_units=config.num_heads)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        qkv = self.qkv(self.norm(x)).view(x.shape[0], -1, self.head_size)
        self.rotary.rotate(qkv[:, : sum(self.heads[:2])], self.rotary.rows(batch.positions))
        num_q, num_qk = self.heads[0], sum(self.heads[:2])
        q, k, v = qkv[:, :num_q], qkv[:, num_q:num_qk], qkv[:, num_qk:]
        return self.output(self.attention(q, k, v, batch))
