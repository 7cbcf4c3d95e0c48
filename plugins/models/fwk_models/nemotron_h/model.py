"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import Model, ModelContext
from fwk_layers import LMHead, RMSNorm, VocabEmbedding
from fwk_models._common.mamba2 import Mamba2Mixer, MixerSizes
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.recurrent import RecurrentRows
from fwk_models._common.stack import MLP, SelfAttention

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

Mixer = Callable[["Tensor", RecurrentRows, "ForwardBatch"], "Tensor"]
"""[num_tokens, hidden_size] to the same."""


class NemotronH(Model):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        eps = config.rms_norm_eps
        self.sizes = MixerSizes(
            config.integer("mamba_num_heads", 128),
            config.integer("mamba_head_dim", 64),
            config.integer("n_groups", 8),
            config.integer("ssm_state_size", 128),
            config.integer("conv_kernel", 4, low=2),
            eps,
            (float(raw.get("time_step_min", 0.001)), float("inf")),
            bias=bool(raw.get("use_bias", False)),
            conv_bias=bool(raw.get("use_conv_bias", True)),
        )
        self.embedding = VocabEmbedding(context, "backbone.embeddings")
        names = [f"backbone.layers.{index}" for index in range(config.num_layers)]
        self.norms = [RMSNorm(context, f"{name}.norm", config.hidden_size, eps) for name in names]
        self.mixers = [self._mixer(context, index, f"{name}.mixer") for index, name in enumerate(names)]
        self.norm = RMSNorm(context, "backbone.norm_f", config.hidden_size, eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = LMHead(context, "lm_head", tied, is_final=True)
        for name in context.weights.names():
            if name.startswith("mtp."):  # predicts further tokens, for speculation
                context.weights.skip(name)

    def forward(self, batch: ForwardBatch) -> Tensor:
        rows = RecurrentRows.of(batch, self.sizes.width)
        x, residual = self.embedding(batch.token_ids), None
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x, residual = norm.add(x, residual)
            x = mixer(x, rows, batch)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids)

    def _mixer(self, context: ModelContext, index: int, prefix: str) -> Mixer:
        kind = context.config.layer_type(index)
        if kind == "linear_attention":
            state_space = Mamba2Mixer(context, prefix, self.sizes)
            return lambda x, rows, batch: state_space(x, rows)
        if kind == "full_attention":
            attention = SelfAttention(context, index, SplitQKV(context, prefix), f"{prefix}.o_proj")
            return lambda x, rows, batch: attention(x, {}, batch)
        if kind == "mlp":
            raw = context.config.raw
            function, bias = str(raw.get("mlp_hidden_act") or "relu2"), bool(raw.get("mlp_bias", False))
            mlp = MLP(context, f"{prefix}.up_proj", f"{prefix}.down_proj", function, bias=bias)
            return lambda x, rows, batch: mlp(x)
        raise ModelLoadError(
            f"config.json: layer {index} is of kind {kind!r}: linear_attention, full_attention and mlp are served, "
            "experts without a gate are not"
        )
