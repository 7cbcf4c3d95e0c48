"""The networks of EAGLE heads: a projection and one decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from fwk.errors import ModelLoadError
from fwk_layers import (
    Attention,
    GatedMLP,
    LMHead,
    QKVLinear,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    RotaryRows,
    RowParallelLinear,
    SelectTokens,
)
from fwk_speculative._common.heads import DraftHead

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import Model, ModelContext
    from fwk.interfaces.speculative import TargetStep
    from fwk.types import ForwardBatch


class HeadLayer:
    """Llama's decoder layer (of Qwen2 with biases), whose attention reads what it is given."""

    def __init__(self, context: ModelContext, prefix: str, in_features: int) -> None:
        config, attention = context.config, f"{prefix}.self_attn"
        if config.num_layers != 1:
            raise ModelLoadError(f"config.json: a head of {config.num_layers} layers; those of one are read")
        self.rotary = RotaryEmbedding(context)
        bias = context.weights.has(f"{attention}.q_proj.bias")
        self.qkv = QKVLinear(context, attention, bias=bias, in_features=in_features)
        self.output = RowParallelLinear(
            context,
            f"{attention}.o_proj",
            config.num_heads * config.head_size,
            config.hidden_size,
            num_units=config.num_heads,
            bias=context.weights.has(f"{attention}.o_proj.bias"),
        )
        self.head_size, self.num_heads, self.num_kv_heads = config.head_size, self.qkv.num_heads, self.qkv.num_kv_heads
        self.attention = Attention(context, self.num_heads, self.num_kv_heads, index=0, prefix=attention)
        self.wanted = SelectTokens(context, 0)
        self.mlp_norm = RMSNorm(context, f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(context, f"{prefix}.mlp", bias=context.weights.has(f"{prefix}.mlp.up_proj.bias"))

    def __call__(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """The MLP's output and the residual stream it is still to be added to: [num_hidden, hidden_size] each.

        x: [num_tokens, in_features]; residual: [num_tokens, hidden_size], which is changed.
        """
        x = self._attend(x, self.rotary.rows(batch.positions), batch)
        x, residual = self.mlp_norm.add(x, self.wanted(residual, batch))
        return self.mlp(x), residual

    def _attend(self, x: Tensor, rows: RotaryRows, batch: ForwardBatch) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)
        return self.output(self.attention.turned(qkv, self.rotary, rows, batch))


class EagleHead(DraftHead):
    """The token's embedding and the feature before it, projected, through a layer without a norm before attention.

    Its output stands for the target's next hidden state: the target's own head reads it.
    """

    def __init__(self, context: ModelContext, target: Model) -> None:
        config, weights, prefix = context.config, context.weights, "layers.0"
        size = config.hidden_size
        self._target, self._operators = target, context.operators
        self.projection = ReplicatedLinear(context, "fc", 2 * size, size, bias=weights.has("fc.bias"))
        name = f"{prefix}.input_layernorm"
        self.norm = RMSNorm(context, name, size, config.rms_norm_eps) if weights.has(f"{name}.weight") else None
        self.layer = HeadLayer(context, prefix, size)
        _skip(context, "embed_tokens.weight", "lm_head.weight")

    def features(self, step: TargetStep) -> Tensor:
        return step.hidden

    def forward(self, features: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        embedded = self._target.embed(batch.token_ids)
        x = self.projection(self._operators.join([embedded.contiguous(), features.contiguous()]))
        x, residual = self.layer(x if self.norm is None else self.norm(x), x, batch)
        hidden = x + residual
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden)


class Eagle3Head(DraftHead):
    """The token's embedding alongside three of the target's streams in one, each normalised, through one layer.

    What it was before the last norm is the next feature. Logits are of a smaller vocabulary (``d2t``).
    """

    def __init__(self, context: ModelContext, target: Model) -> None:
        config, weights = context.config, context.weights
        size, eps = config.hidden_size, config.rms_norm_eps
        prefix = "midlayer" if weights.has("midlayer.self_attn.q_proj.weight") else "layers.0"
        self._target, self._operators, self._raw, self._size = target, context.operators, config.raw, size
        self.projection = ReplicatedLinear(context, "fc", 3 * size, size, bias=weights.has("fc.bias"))
        self.embedding_norm = RMSNorm(context, f"{prefix}.input_layernorm", size, eps)
        self.feature_norm = RMSNorm(context, f"{prefix}.hidden_norm", size, eps)
        self.layer = HeadLayer(context, prefix, 2 * size)
        self.norm = RMSNorm(context, "norm", size, eps)
        self.norms_stream = bool(config.raw.get("norm_before_residual", False))
        self.head: LMHead | None = None
        draft_size = config.integer("draft_vocab_size", config.vocab_size)
        if weights.has("lm_head.weight"):
            self.head = LMHead(replace(context, config=replace(config, vocab_size=draft_size)), "lm_head")
        if weights.has("d2t"):
            offsets = weights.raw("d2t").to(torch.int64)
            tokens = torch.arange(len(offsets)) + offsets
            if len(offsets) != draft_size or not bool(((tokens >= 0) & (tokens < config.vocab_size)).all()):
                raise ModelLoadError(
                    f"d2t has {len(offsets)} entries up to token {int(tokens.max())}: draft_vocab_size is {draft_size} "
                    f"and the vocabulary {config.vocab_size} tokens"
                )
            self.token_ids = tokens.to(context.device)
        elif draft_size != config.vocab_size:
            raise ModelLoadError(f"draft_vocab_size is {draft_size}, and no d2t says which tokens those are")
        _skip(context, "embed_tokens.weight", "t2d")

    def layers_read(self, num_layers: int) -> Sequence[int]:
        """The layers of the target whose incoming streams are its features, of ``num_layers``.

        ``eagle_config.eagle_aux_hidden_state_layer_ids`` names layers by their outputs, as ModelOpt writes it; the
        same key on the top level, as speculators writes it, by their inputs.
        """
        nested: Any = self._raw.get("eagle_config")
        own = cast("dict[str, Any]", nested).get("eagle_aux_hidden_state_layer_ids") if nested else None
        given: Any = self._raw.get("eagle_aux_hidden_state_layer_ids") if own is None else [i + 1 for i in own]
        if given is None:
            return (2, num_layers // 2, num_layers - 3)
        if not isinstance(given, list) or len(cast("list[Any]", given)) != 3:
            raise ModelLoadError(f"config.json: eagle_aux_hidden_state_layer_ids must name three layers, not {given!r}")
        return cast("list[int]", given)

    def features(self, step: TargetStep) -> Tensor:
        return self.projection(self._operators.join([tap.contiguous() for tap in step.taps]))

    def forward(self, features: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        embedded = self.embedding_norm(self._target.embed(batch.token_ids))
        normed = self.feature_norm(features)
        residual = normed.clone() if self.norms_stream else features
        x, residual = self.layer(self._operators.join([embedded, normed]), residual, batch)
        return self.norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden) if self.head is None else self.head(hidden)


def _skip(context: ModelContext, *names: str) -> None:
    """Leave out what the target has too, or is for training alone."""
    for name in names:
        if context.weights.has(name):
            context.weights.skip(name)
