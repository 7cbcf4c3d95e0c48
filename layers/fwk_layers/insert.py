"""Rows of media in place of their tokens' embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


def insert(hidden: Tensor, batch: ForwardBatch) -> Tensor:
    """The embedded tokens of a batch, [num_tokens, hidden_size], with the rows that the step inserts."""
    inserted = batch.inserted
    return hidden if inserted is None else hidden.index_copy(0, inserted.rows, inserted.values.to(hidden.dtype))
