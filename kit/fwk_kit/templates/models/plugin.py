"""A decoder of the Llama family, on the layers of ``fwk_layers``: none knows of ranks, weight formats or adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import Model, ModelContext
from fwk_layers import (
    Attention,
    GatedMLP,
    LMHead,
    QKVLinear,
    RMSNorm,
    RotaryEmbedding,
    RotaryRows,
    RowParallelLinear,
    VocabEmbedding,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class MineModel(Model):
    """Token ids to hidden states to logits. Building a layer reads its weights."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self.embedding = VocabEmbedding(context, "model.embed_tokens")
        self.rotary = RotaryEmbedding(context)
        self.layers = [Layer(context, self.rotary, f"model.layers.{index}") for index in range(config.num_layers)]
        self.norm = RMSNorm(context, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = LMHead(context, "lm_head", self.embedding if config.tie_word_embeddings else None)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x, residual = self.embedding(batch.token_ids), None
        rows = self.rotary.rows(batch.positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rows, batch)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Layer:
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, context: ModelContext, rotary: RotaryEmbedding, prefix: str) -> None:
        config = context.config
        self.rotary, self.head_size = rotary, config.head_size
        self.input_norm = RMSNorm(context, f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.qkv = QKVLinear(context, f"{prefix}.self_attn")
        self.heads = (self.qkv.num_heads, self.qkv.num_kv_heads, self.qkv.num_kv_heads)
        self.attention = Attention(context, self.heads[0], self.heads[1], sliding_window=config.sliding_window)
        size = config.num_heads * config.head_size
        name = f"{prefix}.self_attn.o_proj"
        self.output = RowParallelLinear(context, name, size, config.hidden_size, num_units=config.num_heads)
        self.mlp_norm = RMSNorm(context, f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(context, f"{prefix}.mlp")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the stream it is still to be added to: [num_tokens, hidden_size] each."""
        x, residual = self.input_norm.add(x, residual)
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)
        self.rotary.rotate(qkv[:, : sum(self.heads[:2])], rows)  # q and k at once: they are neighbours
        num_q, num_qk = self.heads[0], sum(self.heads[:2])
        q, k, v = qkv[:, :num_q], qkv[:, num_q:num_qk], qkv[:, num_qk:]
        x = self.output(self.attention(q, k, v, batch))
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual
