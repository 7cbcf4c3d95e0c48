"""The trunk of decoders whose layers normalise the residual stream before attention and before the MLP."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from fwk.interfaces.model import Model, ModelContext
from fwk_layers import (
    Border,
    HiddenTap,
    LMHead,
    RMSNorm,
    RotaryEmbedding,
    RotaryRows,
    SelectTokens,
    VocabEmbedding,
    insert,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class Decoder(Model):
    """Token ids to hidden states to logits. ``root``: what names of its weights begin with, but for ``head_name``."""

    prunes_last_layer = True
    divides_layers = True
    root: str = "model"
    head_name: str = "lm_head"

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self.border = Border(context)
        self.embedding = VocabEmbedding(context, f"{self.root}.embed_tokens")
        self.rotary = self.make_rotary(context)
        self.layers = [self.make_layer(context, index) for index in context.layers]
        self.norm = RMSNorm(context, f"{self.root}.norm", config.hidden_size, config.rms_norm_eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = LMHead(context, self.head_name, tied, is_final=True)

    def make_rotary(self, context: ModelContext) -> RotaryEmbedding:
        """The table of angles for all layers."""
        return RotaryEmbedding(context)

    @abstractmethod
    def make_layer(self, context: ModelContext, index: int) -> DecoderLayer:
        """Layer ``index``; ``self.rotary`` is there."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.border.enter(batch)
        if x is None:
            x = insert(self.embedding(batch.token_ids), batch)
        rows = self.angles(batch)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, rows, batch)
        return self.norm.add(x, residual)[0] if self.border.is_last else self.border.leave(x, residual)

    def angles(self, batch: ForwardBatch) -> RotaryRows:
        """Those of the batch's tokens, for all layers."""
        return self.rotary.rows(batch.positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids)


class DecoderLayer:
    """Attention and MLP or experts, each on the normalised residual stream.

    ``make_attention`` and ``make_mlp`` get the prefix of their part of the layer, and build it.
    """

    def __init__(
        self, context: ModelContext, index: int, make_attention: Any, make_mlp: Any, root: str = "model"
    ) -> None:
        config, prefix = context.config, f"{root}.layers.{index}"
        self.input_norm = RMSNorm(context, f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = make_attention(f"{prefix}.self_attn")
        self.tap, self.wanted = HiddenTap(context, index), SelectTokens(context, index)
        self.mlp_norm = RMSNorm(context, f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = make_mlp(f"{prefix}.mlp")
        self.input_norm.feed(self.attention)
        self.mlp_norm.feed(self.mlp)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the residual stream it is still to be added to: [num_tokens, hidden_size] each (last layer: fewer)."""
        self.tap.change(x)
        x, residual = self.input_norm.add(x, residual)
        self.tap(residual)
        x = self.attention(x, rows, batch)
        x, residual = self.mlp_norm.add(x, self.wanted(residual, batch))
        return self.mlp(x), residual
