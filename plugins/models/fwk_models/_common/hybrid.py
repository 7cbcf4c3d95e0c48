"""Decoders some of whose layers are recurrent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fwk.interfaces.model import Model
from fwk_layers import LMHead, RMSNorm, RotaryEmbedding, RotaryRows, VocabEmbedding, insert
from fwk_models._common.recurrent import RecurrentRows

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

Layer = Callable[["Tensor", "Tensor | None", RecurrentRows, RotaryRows, "ForwardBatch"], "tuple[Tensor, Tensor]"]
"""x and the residual stream it is still to be added to: [num_tokens, hidden_size] each, to the same."""


class Hybrid(Model):
    """Token ids to hidden states to logits; a model's ``__init__`` sets what is named here. width: of convolutions."""

    width: int
    embedding: VocabEmbedding
    rotary: RotaryEmbedding
    layers: Sequence[Layer]
    norm: RMSNorm
    head: LMHead

    def forward(self, batch: ForwardBatch) -> Tensor:
        rows, angles = RecurrentRows.of(batch, self.width), self.angles(batch)
        x, residual = insert(self.embedding(batch.token_ids), batch), None
        for layer in self.layers:
            x, residual = layer(x, residual, rows, angles, batch)
        return self.norm.add(x, residual)[0]

    def angles(self, batch: ForwardBatch) -> RotaryRows:
        """Those of the batch's tokens, for all layers."""
        return self.rotary.rows(batch.positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids)
