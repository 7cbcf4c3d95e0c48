"""Drafting with a head that reads the target's hidden states, step by step, in chains or trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fwk.interfaces.speculative import (
    Drafts,
    DraftView,
    SpeculativeContext,
    SpeculativeDecoder,
    TargetStep,
    Verified,
)
from fwk_speculative._common import DraftDepth, TreeOptions
from fwk_speculative._common.chains import Chains
from fwk_speculative._common.payoff import Payoff
from fwk_speculative._common.trees import DraftTrees

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class DraftHead(ABC):
    """Turns a token's features and the token after it into what the target would make of the latter."""

    token_ids: Tensor | None = None
    """[draft_vocab_size] int64: the target's tokens that its logits are of; None: all of them, in order."""

    @abstractmethod
    def features(self, step: TargetStep) -> Tensor:
        """What it reads of the target's step: [num_tokens, feature_size]."""

    @abstractmethod
    def forward(self, features: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Hidden states and features of the batch's wanted tokens: [num_hidden, hidden_size] each.

        features: those of the tokens before the batch's, [num_tokens, feature_size], from ``features`` or an earlier
        call; they may be changed.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, draft_vocab_size]."""


class HeadDecoder(SpeculativeDecoder):
    """Drafts with a ``DraftHead``, on its own features once the target's end (EAGLE, arXiv:2401.15077)."""

    reads_hidden = True

    def __init__(self, context: SpeculativeContext, options: TreeOptions, head: DraftHead) -> None:
        super().__init__(context)
        self._width, levels, self._num_tokens = options.tree_shape()
        self.acceptance = options.acceptance()
        self.max_drafts = max(self._num_tokens, (levels - 1) * self._width + 1)
        self._depth = DraftDepth(context.num_slots, levels, options.speculative_adaptive)
        self._most_levels = levels
        self.drafts_late, self.drafts_trees = True, self._width > 1
        self._levels = np.zeros(context.num_slots, np.int64)  # of each slot's last drafts
        self._payoff = Payoff(context.num_slots, is_on=context.is_host and options.speculative_adaptive)
        self._head = head
        self._last: tuple[Tensor, Tensor] | None = None
        """The head's hidden states and features after each slot's newest token: [num_slots, hidden_size] each."""

    @property
    def max_passes(self) -> int:
        return self._most_levels

    @property
    def max_levels(self) -> int:
        return self._most_levels

    def learn(self, step: TargetStep) -> None:
        if self._payoff.is_off(step.slots).all():
            return
        features = self._head.features(step)
        found = self._head.forward(features, step.batch())
        if self._last is None:
            count = self.context.num_slots
            self._last = tuple(x.new_zeros((count, x.shape[1])) for x in found)  # type: ignore[assignment]
        assert self._last is not None
        slots = self.context.send(step.slots)
        for kept, x in zip(self._last, found, strict=True):
            kept.index_copy_(0, slots, x)

    def observe(self, verified: Verified) -> None:
        levels = verified.num_drafts
        if self._width > 1:
            levels = np.minimum(levels, self._levels[verified.slots])
        self._depth.observe(Verified(verified.slots, levels, verified.num_accepted))
        self._payoff.observe(verified)

    def forget(self, slots: Sequence[int]) -> None:
        self._depth.reset(list(slots))
        self._payoff.reset(slots)

    def propose(self, view: DraftView) -> Drafts:
        depth = np.minimum(view.max_drafts, self._depth.of(view.slots))
        depth[self._payoff.is_off(view.slots)] = 0
        self._levels[view.slots[depth > 0]] = depth[depth > 0]  # others may have drafts that are being verified
        return self._chains(view, depth) if self._width == 1 else self._trees(view, depth)

    def _after(self, view: DraftView, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        assert self._last is not None, "the target computed no step yet"
        slots = self.context.send(view.slots[rows])
        return self._last[0].index_select(0, slots), self._last[1].index_select(0, slots)

    def _chains(self, view: DraftView, depth: np.ndarray) -> Drafts:
        chains = Chains(depth, self.context.send)
        rows = chains.rows
        if not len(rows):
            return chains.drafts()
        hidden, features = self._after(view, rows)
        ahead = 0
        while True:
            picked = view.steps.choose(self._whole(self._head.logits(hidden)), rows, ahead)
            left = chains.add(picked)
            rows = chains.rows
            if not len(rows):
                return chains.drafts()
            if left is not None:
                picked, features = picked.index_select(0, left), features.index_select(0, left)
            hidden, features = self._head.forward(features, view.steps.batch(rows, picked, ahead))
            ahead += 1

    def _whole(self, logits: Tensor) -> Tensor:
        """Logits of all the target's tokens: [n, vocab_size]."""
        if self._head.token_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.context.vocab_size), float("-inf"))
        return whole.index_copy_(1, self._head.token_ids, logits)

    def _trees(self, view: DraftView, depth: np.ndarray) -> Drafts:
        levels = int(depth.max(initial=0))
        rows = np.flatnonzero((view.max_drafts > (levels - 1) * self._width) & (depth > 0))
        if not len(rows):
            return Drafts([[] for _ in view.slots], [[] for _ in view.slots])
        most = np.minimum(view.max_drafts, self._num_tokens)
        return self._grow(view, rows, levels).drafts(rows, most, self.context.send)

    def _grow(self, view: DraftView, rows: np.ndarray, levels: int) -> DraftTrees:
        hidden, root = self._after(view, rows)
        trees = DraftTrees(self._width, self._logprobs(hidden))
        count, width = len(rows), self._width
        expanded = torch.empty((count, 0), dtype=torch.int64, device=root.device)  # candidates, in order
        before = root.new_empty((count, 0, root.shape[1]))  # features of the token before each of them
        above = expanded  # place among the expanded of each one's parent
        after = root.unsqueeze(1)
        for _ in range(levels - 1):
            parents = trees.parents.gather(1, trees.frontier)
            # Expanded candidates are told apart by their numbers; -1, the sequence's own end, comes first in ``after``.
            places = (expanded.unsqueeze(1) == parents.unsqueeze(2)).int()
            place = torch.where(parents < 0, -1, places.argmax(2)) if expanded.shape[1] else parents
            features = after.gather(1, (place + (after.shape[1] - expanded.shape[1])).clamp_(min=0).unsqueeze(2).expand(
                -1, -1, after.shape[2]
            ))  # fmt: skip
            before = torch.cat((before, features), 1)
            expanded = torch.cat((expanded, trees.frontier), 1)
            above = torch.cat((above, place), 1)
            batch = view.steps.nodes(rows, self._mapped(trees.tokens.gather(1, expanded)), above)
            hidden, features = self._head.forward(before.flatten(0, 1), batch)
            after = torch.cat((root.unsqueeze(1), features.view(count, -1, features.shape[1])), 1)
            newest = hidden.view(count, -1, hidden.shape[1])[:, -width:]
            trees.grow(self._logprobs(newest.flatten(0, 1)).view(count, width, -1))
        trees.tokens = self._mapped(trees.tokens)
        return trees

    def _logprobs(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self._head.logits(hidden.contiguous()).float(), -1)

    def _mapped(self, tokens: Tensor) -> Tensor:
        ids = self._head.token_ids
        return tokens if ids is None else ids.index_select(0, tokens.reshape(-1)).view(tokens.shape)
