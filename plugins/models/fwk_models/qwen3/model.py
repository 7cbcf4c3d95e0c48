"""Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import Model, ModelContext
from fwk.layers import (
    GatedMLP,
    LMHead,
    MoE,
    RMSNorm,
    RotaryEmbedding,
    RotaryRows,
    Routing,
    VocabEmbedding,
)
from fwk_models._common.attention import NormedAttention

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch, ModelConfig


class Qwen3(Model):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self.embedding = VocabEmbedding(context, "model.embed_tokens")
        self.rotary = RotaryEmbedding(context)
        self.layers = [Qwen3Layer(context, self.rotary, index) for index in range(config.num_layers)]
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


class Qwen3Layer:
    """Attention and MLP or experts, each on the normalised residual stream."""

    def __init__(self, context: ModelContext, rotary: RotaryEmbedding, index: int) -> None:
        config, prefix = context.config, f"model.layers.{index}"
        self.input_norm = RMSNorm(context, f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = NormedAttention(
            context,
            rotary,
            f"{prefix}.self_attn",
            bias=bool(config.raw.get("attention_bias", False)),
            sliding_window=config.window_of(index),
        )
        self.mlp_norm = RMSNorm(context, f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = (experts if has_experts(config, index) else GatedMLP)(context, f"{prefix}.mlp")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the residual stream it is still to be added to: [num_tokens, hidden_size] each."""
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, rows, batch)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


def has_experts(config: ModelConfig, index: int) -> bool:
    """Whether the layer is a mixture of experts."""
    if config.architecture == "Qwen3ForCausalLM":
        return False
    every = int(config.raw.get("decoder_sparse_step") or 1)
    return index not in (config.raw.get("mlp_only_layers") or ()) and (index + 1) % every == 0


def experts(context: ModelContext, prefix: str) -> MoE:
    """A layer's experts."""
    config = context.config
    name = "num_experts" if "num_experts" in config.raw else "num_local_experts"  # transformers 5 writes the latter
    normalises = bool(config.raw.get("norm_topk_prob", False))
    routing = Routing(config.integer(name), config.integer("num_experts_per_tok"), normalises=normalises)
    return MoE(context, prefix, routing, intermediate_size=config.integer("moe_intermediate_size"))
