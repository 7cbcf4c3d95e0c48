"""Token embedding and the head that turns hidden states into logits, sharded over the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.interfaces.quant import PLAIN, LayerKind, LinearShape, Weights
from fwk.layers.sharding import PaddedRows, Part, load

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class VocabEmbedding:
    """Token ids to hidden states. The last rank's rows are padded with zeros.

    ``matrix`` holds this rank's rows, [num_rows, hidden_size]; None where they stay packed (``form``, ``weights``).
    scale: factor on the hidden states, rounded to the model's dtype.
    """

    def __init__(self, context: ModelContext, prefix: str, *, scale: float | None = None) -> None:
        config = context.config
        self.operators = context.operators
        self.scale = None if scale is None else torch.tensor(scale, dtype=context.dtype).item()
        self.tp, self.prefix = context.tp, prefix
        self.vocab_size = config.vocab_size
        self.rows = PaddedRows.of(config.vocab_size, context.tp)
        self.form = context.quant.choose(prefix, LayerKind.EMBEDDING)
        self.matrix: Tensor | None = None
        self.weights: Weights = None
        if self.form.layout == PLAIN:
            name = f"{prefix}.weight"
            whole = context.weights.tensor_as(name, (config.vocab_size, config.hidden_size), context.dtype)
            self.matrix = self.rows.cut(whole, 0, 1, name).to(context.device).contiguous()
        else:
            self.weights = load(context, self.form, [(Part(prefix, config.vocab_size), self.rows)], config.hidden_size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 to [num_tokens, hidden_size]."""
        if self.tp.size == 1:
            return self._look_up(token_ids)
        local = token_ids - self.rows.first
        is_other = (local < 0) | (local >= self.rows.num_rows)
        hidden = self._look_up(local.masked_fill(is_other, 0))
        return self.tp.all_reduce(hidden.masked_fill_(is_other.unsqueeze(-1), 0))

    def share(self, weights: Weights) -> None:
        """Look rows up in a tied head's weights from now on, where its method can, and let go of ``matrix``."""
        if self.form.method.can_embed:
            self.matrix, self.weights = None, weights

    def _look_up(self, rows: Tensor) -> Tensor:
        if self.matrix is not None:
            return self.operators.rows(self.matrix, rows, self.scale)
        found = self.form.method.rows(self.weights, rows)
        if self.scale is not None:
            self.operators.scale(found, self.scale)
        return found


class LMHead:
    """Hidden states to logits. Tied to ``embedding`` they share one copy of the numbers.

    It is two where another format was chosen, or the head's method cannot look rows up in its layout.
    is_final: nothing is done to what it returns before tokens are chosen, so that greedy steps may leave out all but
    the largest (``QuantMethod.lm_head``, which makes ``head_weights``).
    """

    def __init__(
        self, context: ModelContext, prefix: str, embedding: VocabEmbedding | None = None, *, is_final: bool = False
    ) -> None:
        config = context.config
        self.tp, self.vocab_size = context.tp, config.vocab_size
        stored = prefix if embedding is None else embedding.prefix
        form = context.quant.choose(prefix, stored=stored)
        self.method = form.method
        self.weights: Weights = None
        if embedding is None or form != embedding.form:
            rows = PaddedRows.of(config.vocab_size, self.tp)
            self.weights = load(context, form, [(Part(stored, config.vocab_size), rows)], config.hidden_size)
        elif embedding.matrix is not None:
            out = (embedding.rows.num_rows,)
            shape = LinearShape(config.hidden_size, out, context.dtype, context.device, stored)
            self.weights = form.method.finish({"weight": embedding.matrix}, shape)
            embedding.share(self.weights)
        else:
            self.weights = embedding.weights
        self.head_weights = self.weights
        if is_final and context.is_greedy is not None and self.tp.size == 1:  # padding might be the largest of a rank
            self.head_weights = self.method.lm_head(self.weights, context.is_greedy)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], the same on all ranks."""
        logits = self.tp.all_gather(self.method.apply(self.head_weights, hidden, None), -1)
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]
