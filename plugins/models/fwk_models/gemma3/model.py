"""Gemma 3 (text): local and global layers, norms before and after each block, scaled embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.model import Model, ModelContext
from fwk.layers import (
    GatedMLP,
    HiddenTap,
    LMHead,
    OffsetRMSNorm,
    RotaryEmbedding,
    RotaryRows,
    SelectTokens,
    VocabEmbedding,
)
from fwk_models._common.attention import NormedAttention

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class Gemma3(Model):
    """Token ids to hidden states to logits."""

    prunes_last_layer = True

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        if raw.get("use_bidirectional_attention"):
            raise ModelLoadError("this Gemma 3 attends in both directions: it embeds text and generates none")
        self.embedding = VocabEmbedding(context, "model.embed_tokens", scale=config.hidden_size**0.5)
        kinds = sorted({config.layer_type(index) for index in range(config.num_layers)})
        self.rotary = {kind: RotaryEmbedding(context, rope=config.rope_of(kind)) for kind in kinds}
        self.layers = [Gemma3Layer(context, self.rotary, index) for index in range(config.num_layers)]
        self.norm = OffsetRMSNorm(context, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.soft_cap: float | None = raw.get("final_logit_softcapping")
        tied = self.embedding if raw.get("tie_word_embeddings", True) else None
        self.head = LMHead(context, "lm_head", tied, is_final=self.soft_cap is None)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embedding(batch.token_ids)
        rows = {kind: rotary.rows(batch.positions) for kind, rotary in self.rotary.items()}
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, rows[layer.kind], batch)
        return self.norm.add(x, residual)[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


class Gemma3Layer:
    """Attention and MLP, each between two norms."""

    def __init__(self, context: ModelContext, rotary: dict[str, RotaryEmbedding], index: int) -> None:
        config, raw, prefix = context.config, context.config.raw, f"model.layers.{index}"

        def norm(name: str) -> OffsetRMSNorm:
            return OffsetRMSNorm(context, f"{prefix}.{name}", config.hidden_size, config.rms_norm_eps)

        self.kind = config.layer_type(index)
        self.input_norm = norm("input_layernorm")
        self.attention = NormedAttention(
            context,
            rotary[self.kind],
            f"{prefix}.self_attn",
            index,
            norm=OffsetRMSNorm,
            bias=bool(raw.get("attention_bias", False)),
            scale=float(raw.get("query_pre_attn_scalar") or 256) ** -0.5,
            soft_cap=raw.get("attn_logit_softcapping"),
        )
        self.tap, self.wanted = HiddenTap(context, index), SelectTokens(context, index)
        self.attention_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(context, f"{prefix}.mlp", activation=raw.get("hidden_activation") or "gelu_pytorch_tanh")
        self.output_norm = norm("post_feedforward_layernorm")
        self.input_norm.feed(self.attention)
        self.mlp_norm.feed(self.mlp)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the residual stream it is still to be added to: [num_tokens, hidden_size] each (last layer: fewer)."""
        self.tap.change(x)
        x, residual = self.input_norm.add(x, residual)
        self.tap(residual)
        x = self.attention_norm(self.attention(x, rows, batch))
        x, residual = self.mlp_norm.add(x, self.wanted(residual, batch))
        return self.output_norm(self.mlp(x)), residual
