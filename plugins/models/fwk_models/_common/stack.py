"""Decoders put together from parts: blocks with norms before, after or around, one after another or side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fwk.interfaces.model import Model, ModelContext
from fwk_layers import (
    Attention,
    Border,
    ColumnParallelLinear,
    HiddenTap,
    LMHead,
    Part,
    RotaryEmbedding,
    RotaryRows,
    RowParallelLinear,
    SelectTokens,
    VocabEmbedding,
    activation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

Apply = Callable[["Tensor"], "Tensor"]
Mixer = Callable[["Tensor", "Rows", "ForwardBatch"], "Tensor"]
"""Attention, or what stands in its place: of a layer's tokens, the step's angles and the batch."""
Rows = Mapping[RotaryEmbedding, RotaryRows]
"""The step's angles, by the table they come from."""


def unchanged(x: Tensor) -> Tensor:
    """Where a block has no norm."""
    return x


class Heads(Protocol):
    """What makes q, k and v: one of ``fwk_models._common.qkv``."""

    num_heads: int
    num_kv_heads: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class SelfAttention:
    """Attention over the sequence's past.

    rotary: None for layers without rotary positions. norm: of queries and keys, before they are rotated. settings: of
    ``fwk_layers.Attention``.
    """

    def __init__(
        self,
        context: ModelContext,
        index: int,
        qkv: Heads,
        output: str,
        *,
        rotary: RotaryEmbedding | None = None,
        norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        bias: bool = False,
        **settings: Any,
    ) -> None:
        config = context.config
        self.qkv, self.rotary, self.norm = qkv, rotary, norm
        size = config.num_heads * config.head_size
        self.output = RowParallelLinear(
            context, output, size, config.hidden_size, num_units=config.num_heads, bias=bias
        )
        prefix = output.rpartition(".")[0]
        self.attention = Attention(context, qkv.num_heads, qkv.num_kv_heads, index=index, prefix=prefix, **settings)

    def __call__(self, x: Tensor, rows: Rows, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same, of the last layer the wanted tokens."""
        q, k, v = self.qkv(x)
        if self.norm is not None:
            q, k = self.norm(q, k)
        if self.rotary is not None:
            q, k = (self.rotary.rotate(part, rows[self.rotary]) for part in (q, k))
        return self.output(self.attention(q, k, v, batch))


class MLP:
    """down(activation(up(x))), without a gate."""

    def __init__(self, context: ModelContext, up: str, down: str, function: str, *, bias: bool = False) -> None:
        """up, down: the layers' names; function: the activation's."""
        config = context.config
        self.activation = activation(function)
        parts = [Part(up, config.intermediate_size)]
        self.up = ColumnParallelLinear(context, parts, config.hidden_size, bias=bias)
        self.down = RowParallelLinear(context, down, config.intermediate_size, config.hidden_size, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        return self.down(self.activation(self.up(x)))


class JoinedGatedMLP:
    """down(activation(gate) * up), with gate and up stored as one matrix in this order."""

    def __init__(self, context: ModelContext, gate_up: str, down: str, function: str, inner: int | None = None) -> None:
        inner = inner or context.config.intermediate_size
        hidden = context.config.hidden_size
        self.function, self.operators = function, context.operators
        activation(function)  # one that is unknown is reported now
        part = Part(gate_up, 2 * inner, segments=((inner, None), (inner, None)))
        self.gate_up = ColumnParallelLinear(context, [part], hidden)
        self.down = RowParallelLinear(context, down, inner, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        return self.down(self.operators.gate(self.gate_up(x), self.function))


class Block:
    """Attention and a feed-forward network, each added to the stream with its norms and a factor.

    is_parallel: both read the stream as it came in, and are added to it together.
    """

    def __init__(
        self,
        context: ModelContext,
        index: int,
        attention: Callable[[Tensor, Rows, ForwardBatch], Tensor],
        mlp: Apply,
        *,
        before: tuple[Apply, Apply],
        after: tuple[Apply, Apply] = (unchanged, unchanged),
        is_parallel: bool = False,
        factor: float = 1.0,
    ) -> None:
        """before, after: norms of attention's and of the network's input and output."""
        self.attention, self.mlp, self.is_parallel, self.factor = attention, mlp, is_parallel, factor
        self.before, self.after = before, after
        self.tap, self.wanted = HiddenTap(context, index), SelectTokens(context, index)

    def __call__(self, x: Tensor, rows: Rows, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same (last layer: the wanted tokens)."""
        self.tap.change(x)
        self.tap(x)
        attended = self.after[0](self.attention(self.before[0](x), rows, batch))
        x = self.wanted(x, batch)
        if self.is_parallel:
            return x + (attended + self.after[1](self.mlp(self.before[1](x)))) * self.factor
        x = x + attended * self.factor
        return x + self.after[1](self.mlp(self.before[1](x))) * self.factor


class Stack(Model):
    """Token ids to hidden states to logits; what a model's ``__init__`` puts together with ``build``."""

    prunes_last_layer = True
    divides_layers = True

    def build(  # noqa: PLR0913 - what sets decoders apart, each by its name
        self,
        context: ModelContext,
        *,
        embedding: VocabEmbedding,
        blocks: Sequence[Block],
        norm: Apply,
        head: str = "lm_head",
        is_tied: bool | None = None,
        rotaries: Sequence[RotaryEmbedding] = (),
        positions: Tensor | None = None,
        embedding_norm: Apply = unchanged,
        before_head: Apply = unchanged,
        logit_scale: float = 1.0,
        soft_cap: float | None = None,
        has_head_bias: bool = False,
    ) -> None:
        """positions: [max_position, hidden_size], learned, row by position; is_tied: the config says unless given."""
        self.border = Border(context)
        self.embedding, self.blocks, self.norm, self.rotaries = embedding, blocks, norm, rotaries
        self.positions, self.embedding_norm, self.before_head = positions, embedding_norm, before_head
        self.logit_scale, self.soft_cap, self.head_bias = logit_scale, soft_cap, None
        tied = embedding if (context.config.tie_word_embeddings if is_tied is None else is_tied) else None
        if has_head_bias and self.border.is_last:
            bias = context.weights.tensor(f"{head}.bias", (context.config.vocab_size,))
            self.head_bias = bias.to(context.device, context.dtype)
        is_final = logit_scale == 1.0 and soft_cap is None and not has_head_bias
        self.head = LMHead(context, head, tied, is_final=is_final)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding(token_ids)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.border.enter(batch)
        if x is None:
            x = self.embedding(batch.token_ids)
            if self.positions is not None:
                x = x + self.positions.index_select(0, batch.positions)
            x = self.embedding_norm(x)
        rows = {rotary: rotary.rows(batch.positions) for rotary in self.rotaries}
        for block in self.blocks:
            x = block(x, rows, batch)
        return self.norm(x) if self.border.is_last else self.border.leave(x)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(self.before_head(hidden))
        if self.head_bias is not None:
            logits = logits + self.head_bias
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


def root_of(context: ModelContext, prefix: str, probe: str) -> str:
    """``prefix`` where the checkpoint's names begin with it, else nothing: published files of older models differ.

    probe: a tensor's name without the prefix.
    """
    weights = context.weights
    return "" if weights.has(probe) and not weights.has(f"{prefix}{probe}") else prefix
