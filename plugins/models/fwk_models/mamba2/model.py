"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import Model, ModelContext
from fwk_layers import LMHead, RMSNorm, VocabEmbedding
from fwk_models._common.mamba2 import Mamba2Mixer, MixerSizes, step_limits
from fwk_models._common.recurrent import RecurrentRows

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class Mamba2(Model):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        eps = float(raw.get("layer_norm_epsilon", 1e-5))
        sizes = MixerSizes(
            config.integer("num_heads", 128),
            config.integer("head_dim", 64),
            config.integer("n_groups", 8),
            config.integer("state_size", 128),
            config.integer("conv_kernel", 4, low=2),
            eps,
            step_limits(raw.get("time_step_limit")),
            bias=bool(raw.get("use_bias", False)),
            conv_bias=bool(raw.get("use_conv_bias", True)),
        )
        self.width = sizes.width
        self.embedding = VocabEmbedding(context, "backbone.embeddings")
        layers = [f"backbone.layers.{index}" for index in range(config.num_layers)]
        self.layers = [
            (
                RMSNorm(context, f"{prefix}.norm", config.hidden_size, eps),
                Mamba2Mixer(context, f"{prefix}.mixer", sizes),
            )
            for prefix in layers
        ]
        self.norm = RMSNorm(context, "backbone.norm_f", config.hidden_size, eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = LMHead(context, "lm_head", tied, is_final=True)

    def forward(self, batch: ForwardBatch) -> Tensor:
        rows = RecurrentRows.of(batch, self.width)
        x, residual = self.embedding(batch.token_ids), None
        for norm, mixer in self.layers:
            x, residual = norm.add(x, residual)
            x = mixer(x, rows)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
