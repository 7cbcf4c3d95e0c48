"""Mamba (Gu and Dao 2023, arXiv:2312.00752) and Falcon Mamba (Zuo et al. 2024, arXiv:2410.05355)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F

from fwk.interfaces.model import Model, ModelContext
from fwk_layers import LMHead, RMSNorm, VocabEmbedding
from fwk_models._common.mamba import MambaMixer, MambaSizes, Norm, step_rank
from fwk_models._common.recurrent import RecurrentRows

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class Mamba(Model):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        eps = float(raw.get("layer_norm_epsilon", 1e-5))
        self.sizes = MambaSizes(
            config.intermediate_size,
            config.integer("state_size", 16),
            step_rank(config, "time_step_rank"),
            config.integer("conv_kernel", 4, low=2),
            bias=bool(raw.get("use_bias", False)),
            conv_bias=bool(raw.get("use_conv_bias", True)),
        )
        norms: tuple[Norm, Norm, Norm] | None = None
        if config.architecture == "FalconMambaForCausalLM":  # norms without weights
            step, state = (
                partial(F.rms_norm, normalized_shape=(size,), eps=float(raw.get("mixer_rms_eps", 1e-6)))
                for size in (self.sizes.rank, self.sizes.state_size)
            )
            norms = (step, state, state)
        self.embedding = VocabEmbedding(context, "backbone.embeddings")
        layers = [f"backbone.layers.{index}" for index in range(config.num_layers)]
        self.layers = [
            (
                RMSNorm(context, f"{prefix}.norm", config.hidden_size, eps),
                MambaMixer(context, f"{prefix}.mixer", self.sizes, norms),
            )
            for prefix in layers
        ]
        self.norm = RMSNorm(context, "backbone.norm_f", config.hidden_size, eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = LMHead(context, "lm_head", tied, is_final=True)

    def forward(self, batch: ForwardBatch) -> Tensor:
        rows = RecurrentRows.of(batch, self.sizes.width)
        x, residual = self.embedding(batch.token_ids), None
        for norm, mixer in self.layers:
            x, residual = norm.add(x, residual)
            x = mixer(x, rows)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids)
