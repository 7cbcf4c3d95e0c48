"""Qwen's hybrids: gated delta rules in most layers, gated attention in the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fwk.interfaces.model import ModelContext, TokenPredictor
from fwk_layers import (
    Attention,
    ColumnParallelLinear,
    LMHead,
    OffsetRMSNorm,
    Part,
    ReplicatedLinear,
    RotaryEmbedding,
    RotaryRows,
    RowParallelLinear,
    SelectTokens,
    VocabEmbedding,
)
from fwk_models._common.delta import DeltaNet
from fwk_models._common.hybrid import Hybrid
from fwk_models._common.norms import HeadNorm
from fwk_models._common.recurrent import RecurrentRows
from fwk_models._common.recurrent_cpu import RecurrentKernels

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch
    from fwk_models._common.stack import Apply


class GatedHybrid(Hybrid):
    """Token ids to hidden states to logits. A model says what its delta rules and feed-forward networks are."""

    delta = DeltaNet

    def __init__(self, context: ModelContext, root: str = "model") -> None:
        """root: what the layers' names begin with."""
        config = context.config
        self.width = config.integer("linear_conv_kernel_dim", 4, low=2)
        self.embedding = VocabEmbedding(context, f"{root}.embed_tokens")
        self.rotary = self.make_rotary(context)
        self.layers = [self._layer(context, f"{root}.layers.{index}", index) for index in range(config.num_layers)]
        self.norm = OffsetRMSNorm(context, f"{root}.norm", config.hidden_size, config.rms_norm_eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = LMHead(context, "lm_head", tied, is_final=True)
        for name in context.weights.names():
            if name.startswith("mtp."):  # predicts further tokens, for speculation
                context.weights.skip(name)

    def make_rotary(self, context: ModelContext) -> RotaryEmbedding:
        """The table of angles for all layers."""
        return RotaryEmbedding(context)

    @abstractmethod
    def mlp(self, context: ModelContext, prefix: str, index: int) -> Apply:
        """The feed-forward network of a layer."""

    def make_predictors(self, context: ModelContext) -> Sequence[TokenPredictor]:
        if not context.weights.has(f"{PREDICTOR}.fc.weight"):
            return ()
        own = replace(context, config=replace(context.config, num_layers=1))
        return [GatedPredictor(own, self)]

    def _layer(self, context: ModelContext, prefix: str, index: int) -> HybridLayer:
        mixer: DeltaNet | GatedAttention
        if context.config.layer_type(index) == "linear_attention":
            mixer = self.delta(context, f"{prefix}.linear_attn")
        else:
            mixer = GatedAttention(context, f"{prefix}.self_attn", self.rotary)
        return HybridLayer(context, prefix, mixer, self.mlp(context, f"{prefix}.mlp", index))


PREDICTOR = "mtp"


class GatedPredictor(TokenPredictor):
    """norm(M [norm(embedding); norm(h)] through a layer with attention); embedding and head are the model's own.

    What the head reads is also the next prediction's hidden state, as in the model.
    """

    def __init__(self, context: ModelContext, target: GatedHybrid) -> None:
        """context: of a model that has this layer alone."""
        size, eps, layer = context.config.hidden_size, context.config.rms_norm_eps, f"{PREDICTOR}.layers.0"
        self.before = [
            OffsetRMSNorm(context, f"{PREDICTOR}.pre_fc_norm_{name}", size, eps) for name in ("embedding", "hidden")
        ]
        self.projection = ReplicatedLinear(context, f"{PREDICTOR}.fc", 2 * size, size)
        attention = GatedAttention(context, f"{layer}.self_attn", target.rotary)
        self.layer = HybridLayer(context, layer, attention, target.mlp(context, f"{layer}.mlp", 0))
        self.norm = OffsetRMSNorm(context, f"{PREDICTOR}.norm", size, eps)
        self.wanted = SelectTokens(context, 0)
        self._target, self._operators = target, context.operators

    def forward(self, embedded: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        parts = [norm(x.contiguous()) for norm, x in zip(self.before, (embedded, hidden), strict=True)]
        x = self.projection(self._operators.join(parts))
        x, residual = self.layer(x, None, None, self._target.angles(batch), batch)
        return self.norm.add(self.wanted(x, batch), self.wanted(residual, batch))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden)


class HybridLayer:
    """A delta rule or attention, then a feed-forward network, each on the normalised residual stream."""

    def __init__(self, context: ModelContext, prefix: str, mixer: DeltaNet | GatedAttention, mlp: Apply) -> None:
        hidden, eps = context.config.hidden_size, context.config.rms_norm_eps
        self.norms = [
            OffsetRMSNorm(context, f"{prefix}.{name}_layernorm", hidden, eps) for name in ("input", "post_attention")
        ]
        self.mixer, self.mlp = mixer, mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RecurrentRows | None, angles: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the residual stream it is still to be added to: [num_tokens, hidden_size] each.

        rows: None is enough for a layer with attention.
        """
        x, residual = self.norms[0].add(x, residual)
        if isinstance(self.mixer, DeltaNet):
            assert rows is not None
            x = self.mixer(x, rows)
        else:
            x = self.mixer(x, angles, batch)
        x, residual = self.norms[1].add(x, residual)
        return self.mlp(x), residual


class GatedAttention:
    """Attention whose output is multiplied by a sigmoid; normalised queries and keys, partly rotated."""

    def __init__(self, context: ModelContext, prefix: str, rotary: RotaryEmbedding) -> None:
        config, bias = context.config, bool(context.config.raw.get("attention_bias", False))
        size, heads, kv_heads = config.head_size, config.num_heads, config.num_kv_heads
        parts = [
            Part(f"{prefix}.q_proj", 2 * heads * size, heads),
            Part(f"{prefix}.k_proj", kv_heads * size, kv_heads),
            Part(f"{prefix}.v_proj", kv_heads * size, kv_heads),
        ]
        self.qkv = ColumnParallelLinear(context, parts, config.hidden_size, bias=bias)
        self.size, self.sizes, self.rotary = size, self.qkv.out_features, rotary
        self.norm = HeadNorm(context, prefix, OffsetRMSNorm)
        self.kernels = RecurrentKernels.of(context)
        self.q_index = torch.arange(0, self.sizes[0] // size, 2)  # of heads, before the gates of each
        self.attention = Attention(context, self.sizes[0] // (2 * size), self.sizes[1] // size, prefix=prefix)
        self.output = RowParallelLinear(
            context, f"{prefix}.o_proj", heads * size, config.hidden_size, num_units=heads, bias=bias
        )

    def __call__(self, x: Tensor, angles: RotaryRows, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        wide, k, v = (part.view(x.shape[0], -1, self.size) for part in self.qkv(x).split(self.sizes, -1))
        q, gate = wide.view(x.shape[0], -1, 2, self.size).unbind(2)
        if self.kernels is not None:
            joined = self.kernels.columns(wide.view(x.shape[0], -1), self.q_index, self.size)
            q, k = (self.rotary.rotate(part, angles) for part in self.norm(joined.view(q.shape), k))
            attended = self.attention(q, k, v, batch)
            return self.output(self.kernels.sigmoid_gate(attended, gate))
        q, k = (self.rotary.rotate(part, angles) for part in self.norm(q.contiguous(), k.contiguous()))
        attended = self.attention(q, k, v.contiguous(), batch)
        return self.output(attended * torch.sigmoid(gate.reshape(x.shape[0], -1)))
