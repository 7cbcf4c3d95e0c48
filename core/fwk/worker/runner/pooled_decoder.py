"""A decoder that does not generate: it makes vectors of prompts, or classifies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.interfaces.model import Encoder, Model, ModelContext
from fwk.layers import ReplicatedLinear

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class PooledDecoder(Encoder):
    """The hidden states of a ``Model``; with ``labels``, the scores of a prompt's last one.

    token_ids: of ``--classifier-from-token``: the score is the logit of the one, or of the second less the first.
    Without them the checkpoint's ``score`` layer makes the scores, as in transformers' ``XForSequenceClassification``.
    """

    def __init__(
        self, model: Model, context: ModelContext, labels: tuple[str, ...], token_ids: tuple[int, ...]
    ) -> None:
        self._model = model
        self._has_labels = bool(labels)
        self._token_ids = torch.tensor(token_ids, device=context.device, dtype=torch.int64)
        self._score: ReplicatedLinear | None = None
        if labels and not token_ids:
            size = context.config.hidden_size
            self._score = ReplicatedLinear(context, "score", size, len(labels), method=context.plain)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._model.forward(batch)

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Tensor | None:
        """Scores [num_seqs, num_labels]; None without labels."""
        if not self._has_labels:
            return None
        last = hidden.index_select(0, batch.query_start[1:].long() - 1)
        if self._score is not None:
            return self._score(last).float()
        logits = self._model.logits(last).float().index_select(1, self._token_ids)
        return logits[:, -1:] - logits[:, :1] if logits.shape[1] == 2 else logits
