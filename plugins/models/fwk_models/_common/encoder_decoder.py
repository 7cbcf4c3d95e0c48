"""Models whose encoder reads the prompt, and whose decoder reads it through cross-attention."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from fwk.interfaces.model import Model, ModelContext
from fwk_layers import (
    Attention,
    ColumnParallelLinear,
    CrossAttention,
    EncoderAttention,
    EncoderDecoderStep,
    LMHead,
    Part,
    RowParallelLinear,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fwk.types import ForwardBatch


Biases = frozenset[str]
"""Which of ``q``, ``k``, ``v`` and ``o`` have a bias."""
ALL: Biases = frozenset("qkvo")
NONE: Biases = frozenset()


class Projections:
    """The matrices of an attention layer below ``prefix``; names: what it calls its ``q``, ``k``, ``v`` and ``o``."""

    def __init__(
        self, context: ModelContext, prefix: str, names: Mapping[str, str], *, bias: Biases, is_cross: bool = False
    ) -> None:
        config = context.config
        size, heads = config.num_heads * config.head_size, config.num_heads

        def joined(which: str) -> ColumnParallelLinear:
            parts = [Part(f"{prefix}.{names[x]}", size, heads) for x in which]
            return ColumnParallelLinear(context, parts, config.hidden_size, bias=bias.issuperset(which))

        joint = ["q", "kv"] if is_cross else ["qkv"]
        if bias.isdisjoint("k") and not bias.isdisjoint("qv"):  # what has no bias stands alone
            joint = ["q", "k", "v"]
        self.inner = [joined(which) for which in joint]
        self._groups = [self.inner[:1], self.inner[1:]] if is_cross else [self.inner]
        output = f"{prefix}.{names['o']}"
        self.output = RowParallelLinear(context, output, size, config.hidden_size, num_units=heads, bias="o" in bias)
        self.head_size = config.head_size
        self.num_heads = self.inner[0].out_features[0] // config.head_size

    def __call__(self, x: Tensor, group: int = 0) -> tuple[Tensor, ...]:
        """[n, hidden_size] to [n, num_heads, head_size] for each of ``q``, ``k``, ``v``; in cross-attention the first
        group is ``q`` and the second ``k``, ``v``."""
        parts = [linear(x).view(x.shape[0], -1, self.num_heads, self.head_size) for linear in self._groups[group]]
        return tuple(one for part in parts for one in part.unbind(1))


class EncoderSelfAttention(Projections):
    """Every token of a prompt sees every other one."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        names: Mapping[str, str],
        *,
        bias: Biases = NONE,
        scale: float | None = None,
    ) -> None:
        super().__init__(context, prefix, names, bias=bias)
        self.attention = EncoderAttention(self.head_size, scale)

    def attend(self, x: Tensor, batch: ForwardBatch, bias: Mapping[int, Tensor] | None = None) -> Tensor:
        """[num_encoded, hidden_size] to the same."""
        q, k, v = self(x)
        return self.output(self.attention(q, k, v, batch, bias))


class DecoderSelfAttention(Projections):
    """A token sees those before it; ``extras`` are those of ``fwk_layers.Attention``."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        names: Mapping[str, str],
        *,
        bias: Biases = NONE,
        scale: float | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(context, prefix, names, bias=bias)
        self.attention = Attention(context, self.num_heads, self.num_heads, scale=scale, extras=extras, prefix=prefix)

    def attend(self, x: Tensor, step: EncoderDecoderStep) -> Tensor:
        """[num_decoded, hidden_size] to the same."""
        q, k, v = self(x)
        return self.output(self.attention(q, k, v, step.decoder))


class DecoderCrossAttention(Projections):
    """A token sees the whole prompt as the encoder left it."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        names: Mapping[str, str],
        own: DecoderSelfAttention,
        *,
        bias: Biases = NONE,
        scale: float | None = None,
    ) -> None:
        super().__init__(context, prefix, names, bias=bias, is_cross=True)
        self.attention = CrossAttention(context, own.attention, scale=scale, prefix=prefix)

    def attend(self, x: Tensor, encoded: Tensor | None, step: EncoderDecoderStep) -> Tensor:
        """x: [num_decoded, hidden_size]; encoded: [num_encoded, hidden_size]. Returns [num_decoded, hidden_size]."""
        (q,) = self(x)
        k, v = (q[:0], q[:0]) if encoded is None else self(encoded, 1)
        return self.output(self.attention(q, k, v, step.cross))


class EncoderDecoder(Model):
    """Token ids to hidden states of the decoder's to logits."""

    head: LMHead
    context: ModelContext
    cross: Sequence[CrossAttention]

    @abstractmethod
    def encode_prompts(self, batch: ForwardBatch) -> Tensor:
        """Whole prompts to hidden states, [num_encoded, hidden_size]."""

    @abstractmethod
    def decode(self, encoded: Tensor | None, step: EncoderDecoderStep) -> Tensor:
        """Hidden states of the decoder's tokens, [num_decoded, hidden_size]. encoded: None where no prompt starts."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        step = EncoderDecoderStep.of(batch, self.context, self.cross)
        encoded = None if step.encoder is None else self.encode_prompts(step.encoder)
        return step.joined(self.decode(encoded, step))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
