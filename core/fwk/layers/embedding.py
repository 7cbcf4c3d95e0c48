"""Token embedding and the head that turns hidden states into logits, sharded over the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from fwk.interfaces.quant import LinearShape

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class _VocabMatrix:
    """This rank's rows of a [vocab_size, hidden_size] matrix; the last rank's are padded with zeros."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        config, tp = context.config, context.tp
        self.tp = tp
        self.vocab_size = config.vocab_size
        self.num_rows = -(-config.vocab_size // tp.size)
        self.first = min(tp.rank * self.num_rows, config.vocab_size)
        whole = context.weights.tensor(f"{prefix}.weight", (config.vocab_size, config.hidden_size))
        mine = whole[self.first : self.first + self.num_rows].to(context.dtype)
        padding = self.num_rows - mine.shape[0]
        self.matrix = (F.pad(mine, (0, 0, 0, padding)) if padding else mine.contiguous()).to(context.device)


class VocabEmbedding(_VocabMatrix):
    """Token ids to hidden states."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 to [num_tokens, hidden_size]."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.matrix)
        local = token_ids - self.first
        is_other = (local < 0) | (local >= self.num_rows)
        hidden = F.embedding(local.masked_fill(is_other, 0), self.matrix)
        return self.tp.all_reduce(hidden.masked_fill_(is_other.unsqueeze(-1), 0))


class LMHead:
    """Hidden states to logits. Tied to ``embedding`` it shares its numbers (the kernel may want its own copy)."""

    def __init__(self, context: ModelContext, prefix: str, embedding: VocabEmbedding | None = None) -> None:
        source = _VocabMatrix(context, prefix) if embedding is None else embedding
        self.tp, self.vocab_size = context.tp, context.config.vocab_size
        self.method = context.plain
        shape = LinearShape(context.config.hidden_size, (source.num_rows,), context.dtype, context.device, prefix)
        self.weights = self.method.finish({"weight": source.matrix}, shape)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], the same on all ranks."""
        logits = self.tp.all_gather(self.method.apply(self.weights, hidden, None), -1)
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]
