"""LFM2 (Liquid AI 2025, arXiv:2511.23404)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import (
    ColumnParallelLinear,
    LMHead,
    Part,
    RMSNorm,
    RotaryEmbedding,
    RotaryRows,
    RowParallelLinear,
    VocabEmbedding,
)
from fwk_models._common.hybrid import Hybrid
from fwk_models._common.norms import HeadNorm
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.recurrent import CausalConv, RecurrentRows, new_state
from fwk_models._common.stack import SelfAttention

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class Lfm2(Hybrid):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        if config.sliding_window is not None:
            raise ModelLoadError(f"config.json: sliding_window {config.sliding_window}: lfm2 has no sliding window")
        self.width = config.integer("conv_L_cache", 3, low=2)
        self.embedding = VocabEmbedding(context, "model.embed_tokens")
        self.rotary = RotaryEmbedding(context)
        self.layers = [Lfm2Layer(context, index, self.rotary, self.width) for index in range(config.num_layers)]
        self.norm = RMSNorm(context, "model.embedding_norm", config.hidden_size, config.rms_norm_eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = LMHead(context, "lm_head", tied, is_final=True)


class Lfm2Layer:
    """A convolution or attention, then a gated feed-forward network, each on the normalised residual stream."""

    def __init__(self, context: ModelContext, index: int, rotary: RotaryEmbedding, width: int) -> None:
        config, prefix = context.config, f"model.layers.{index}"
        self.conv = self.attention = None
        if config.layer_type(index) == "conv":
            self.conv = ShortConv(context, f"{prefix}.conv", width)
        else:
            name, qkv = f"{prefix}.self_attn", SplitQKV(context, f"{prefix}.self_attn")
            norm = HeadNorm(context, name, name="layernorm")
            self.attention = SelfAttention(context, index, qkv, f"{name}.out_proj", rotary=rotary, norm=norm)
            self.attention.attention.wanted = None  # the last layer may be one without attention
        self.rotary = rotary
        hidden, eps, inner = config.hidden_size, config.rms_norm_eps, inner_size(context)
        self.norms = [RMSNorm(context, f"{prefix}.{name}_norm", hidden, eps) for name in ("operator", "ffn")]
        self.operators = context.operators
        parts = [Part(f"{prefix}.feed_forward.{name}", inner) for name in ("w1", "w3")]
        self.gate_up = ColumnParallelLinear(context, parts, hidden)
        self.down = RowParallelLinear(context, f"{prefix}.feed_forward.w2", inner, hidden)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RecurrentRows, angles: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the residual stream it is still to be added to: [num_tokens, hidden_size] each."""
        x, residual = self.norms[0].add(x, residual)
        if self.conv is not None:
            x = self.conv(x, rows)
        else:
            assert self.attention is not None
            x = self.attention(x, {self.rotary: angles}, batch)
        x, residual = self.norms[1].add(x, residual)
        return self.down(self.operators.gate(self.gate_up(x), "silu")), residual


class ShortConv:
    """out_proj(C * conv(B * x))."""

    def __init__(self, context: ModelContext, prefix: str, width: int) -> None:
        size, bias = context.config.hidden_size, bool(context.config.raw.get("conv_bias", False))
        segments = ((size, None),) * 3
        self.in_proj = ColumnParallelLinear(
            context, [Part(f"{prefix}.in_proj", 3 * size, segments=segments)], size, bias=bias
        )
        self.conv = CausalConv(context, f"{prefix}.conv", width, segments[:1], bias=bias)
        self.out_proj = RowParallelLinear(context, f"{prefix}.out_proj", size, size, bias=bias)
        self.state = new_state(context, self.conv)

    def __call__(self, x: Tensor, rows: RecurrentRows) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        before, after, x = self.in_proj(x).chunk(3, -1)
        return self.out_proj(self.conv.gated(before, x, after, self.state.tensors["conv"], rows))


def inner_size(context: ModelContext) -> int:
    """Features of the feed-forward network: two thirds of what the config says, times a factor, rounded up."""
    config, raw = context.config, context.config.raw
    inner = int(raw.get("block_ff_dim") or config.intermediate_size)
    if not raw.get("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    factor, unit = raw.get("block_ffn_dim_multiplier", 1.0), config.integer("block_multiple_of", 256)
    return inner if factor is None else -(-int(factor * inner) // unit) * unit
