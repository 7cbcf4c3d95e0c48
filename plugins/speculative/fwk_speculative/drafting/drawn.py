"""Rows of drafts on whose picks their decoder's probabilities, or a threshold, have a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.device import Upload
from fwk.interfaces.speculative import Acceptance
from fwk.interfaces.step import DrawnDrafts, SequenceRecords, StepRows
from fwk_speculative.drafting.acceptance import rejection_logits, replaces_picks, uniform_draws


class Drawn(DrawnDrafts):
    """Rejection sampling of drafts that were drawn, and thresholds for certain ones.

    drafts: (slot, ``StepRows.num_tokens``) of a row -> the draft at that place and the distribution [vocab_size] it was
    drawn from; None: it was certain, and a threshold may keep it.
    """

    def __init__(
        self,
        drafts: Mapping[tuple[int, int], tuple[int, Tensor | None]],
        table: SequenceRecords,
        send: Upload,
        acceptance: Acceptance,
    ) -> None:
        self._drafts = drafts
        self._table = table
        self._send = send
        self._acceptance = acceptance

    def settle(
        self, logits: Tensor, rows: StepRows, is_greedy: np.ndarray, finished: Callable[[np.ndarray, Tensor], Tensor]
    ) -> tuple[Tensor, list[int], Callable[[Tensor], Tensor] | None]:
        keys = zip(rows.slots.tolist(), rows.num_tokens.tolist(), strict=True)
        found = [(i, *self._drafts[key]) for i, key in enumerate(keys) if key in self._drafts and not is_greedy[i]]
        certain = [(i, draft) for i, draft, q in found if q is None]
        decide = self._keep_certain(rows, certain, finished) if certain else None
        drawn = [(i, draft, q) for i, draft, q in found if q is not None]
        at = [i for i, _, _ in drawn]
        if not at:
            return logits, at, decide
        index, drafts, own, draws = self._of_drafts(rows, at, [draft for _, draft, _ in drawn], finished)
        proposal = torch.stack([q for _, _, q in drawn])
        rest = rejection_logits(own, drafts, proposal, draws, self._acceptance)
        return logits.float().index_copy(0, index, rest), at, decide

    def _keep_certain(
        self, rows: StepRows, found: Sequence[tuple[int, int]], finished: Callable[[np.ndarray, Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Puts certain drafts that a threshold keeps in the place of what was picked."""
        at, tokens = [i for i, _ in found], [draft for _, draft in found]
        index, drafts, own, draws = self._of_drafts(rows, at, tokens, finished)
        is_kept = replaces_picks(own, drafts, draws, self._acceptance)

        def decide(picked: Tensor) -> Tensor:
            mine = picked.index_select(0, index)
            return picked.index_copy(0, index, torch.where(is_kept & (mine >= 0), drafts, mine))

        return decide

    def _of_drafts(
        self, rows: StepRows, at: list[int], tokens: list[int], finished: Callable[[np.ndarray, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows ``at``, their drafts, their logits after all processors, and a number drawn for each."""
        places = np.array(at)
        index, drafts = self._send(places), self._send(np.array(tokens))
        own = finished(places, index)
        draws = uniform_draws(self._table.seeds[rows.slots[at]], rows.num_tokens[at])
        return index, drafts, own, self._send(draws)
