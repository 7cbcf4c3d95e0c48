"""What a head learns from: a model's own texts, with the hidden states that it had while it wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fwk import SpeculativeDecoderSpec, hookimpl
from fwk.errors import ConfigError
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder, TargetStep


@dataclass(slots=True)
class Text:
    """One sequence, prompt and answer."""

    token_ids: Tensor  # [n + 1] int64
    taps: Tensor  # [n, 3 * hidden_size]: of all tokens but the last


@dataclass(slots=True)
class Target:
    """What a head takes over from its target."""

    embedding: Tensor  # [vocab_size, hidden_size] float32
    output: Tensor  # [vocab_size, hidden_size] float32: of its head, as far as that is linear
    layers: tuple[int, int, int]  # whose inputs are the taps


class Collector(SpeculativeDecoder):
    """Proposes nothing and keeps everything. The engine must have no prefix cache: what is found there is not seen."""

    max_drafts = 1
    reads_hidden = True
    texts: list[Text] = []
    target: Target | None = None
    last: Collector | None = None

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        assert context.tap is not None
        assert context.target is not None
        count = context.num_target_layers
        if count < 6:
            raise ConfigError(f"the model has {count} layers: EAGLE-3 reads three of at least 6")
        layers = (2, count // 2, count - 3)
        context.tap(layers)
        embedding = context.target.embed(torch.arange(context.vocab_size)).float()
        identity = torch.eye(embedding.shape[1], dtype=context.target.embed(torch.zeros(1, dtype=torch.int64)).dtype)
        Collector.target = Target(embedding, context.target.logits(identity).float().T.contiguous(), layers)
        Collector.texts, Collector.last = [], self
        self._taps: dict[int, list[Tensor]] = {}
        self._table: np.ndarray | None = None

    def learn(self, step: TargetStep) -> None:
        taps = torch.cat(step.taps, -1).to(torch.bfloat16)
        starts = step.query_start.tolist()
        for slot, first, end in zip(step.slots.tolist(), starts, starts[1:], strict=False):
            self._taps.setdefault(slot, []).append(taps[first:end].clone())

    def propose(self, view: DraftView) -> Drafts:
        self._table = view.token_ids
        return Drafts([[] for _ in view.slots])

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            pieces = self._taps.pop(slot, None)
            if pieces and self._table is not None:
                taps = torch.cat(pieces)
                tokens = torch.from_numpy(self._table[slot, : len(taps) + 1].astype(np.int64))
                self.texts.append(Text(tokens, taps))

    def flush(self) -> None:
        """Keep the sequences that no later step has told are gone."""
        self.forget(list(self._taps))


class CollectorPlugin:
    """Declares it."""

    @hookimpl
    def speculative_decoders(self) -> list[SpeculativeDecoderSpec]:
        return [SpeculativeDecoderSpec(name="collector", load="fwk_kit.training.collect:Collector", api=2)]
