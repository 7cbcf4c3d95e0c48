"""The Llama family, as a transformer that reads top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import Model, ModelContext
from fwk.layers import (
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


class Llama(Model):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self.embedding = VocabEmbedding(context, "model.embed_tokens")
        self.rotary = RotaryEmbedding(context)
        self.layers = [LlamaLayer(context, self.rotary, index) for index in range(config.num_layers)]
        self.norm = RMSNorm(context, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = LMHead(context, "lm_head", self.embedding if config.tie_word_embeddings else None)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embedding(batch.token_ids)
        rows = self.rotary.rows(batch.positions)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, rows, batch)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class LlamaLayer:
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, context: ModelContext, rotary: RotaryEmbedding, index: int) -> None:
        config, prefix = context.config, f"model.layers.{index}"
        self.input_norm = RMSNorm(context, f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = LlamaAttention(context, rotary, f"{prefix}.self_attn", index)
        self.mlp_norm = RMSNorm(context, f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(context, f"{prefix}.mlp", bias=bool(config.raw.get("mlp_bias", False)))

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the residual stream it is still to be added to: [num_tokens, hidden_size] each."""
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, rows, batch)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, context: ModelContext, rotary: RotaryEmbedding, prefix: str, index: int) -> None:
        config = context.config
        bias = bool(config.raw.get("attention_bias", False))
        always_biased = config.architecture == "Qwen2ForCausalLM"  # on q, k and v only, and no key says so
        self.rotary = rotary
        self.qkv = QKVLinear(context, prefix, bias=bias or always_biased)
        self.output = RowParallelLinear(
            context,
            f"{prefix}.o_proj",
            config.num_heads * config.head_size,
            config.hidden_size,
            num_units=config.num_heads,
            bias=bias,
        )
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads
        self.head_size = config.head_size
        self.attention = Attention(context, self.num_heads, self.num_kv_heads, sliding_window=config.window_of(index))

    def __call__(self, x: Tensor, rows: RotaryRows, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)
        num_rotated = self.num_heads + self.num_kv_heads
        self.rotary.rotate(qkv[:, :num_rotated], rows)  # q and k at once: they are neighbours
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return self.output(self.attention(q, k, v, batch))
