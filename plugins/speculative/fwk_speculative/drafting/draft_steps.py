"""Steps of a decoder's own model over the sequences of one view."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.drafting import TokenSampling
from fwk.interfaces.speculative import DraftSteps
from fwk.interfaces.step import StepRows
from fwk.types import ForwardBatch
from fwk_speculative.drafting.draft_tree import DraftTree
from fwk_speculative.drafting.inputs import DraftInputs


class Steps(DraftSteps):
    """Those of a worker: inputs come from the worker's buffers, picks from its samplers."""

    def __init__(
        self,
        plan: Callable[[ForwardBatch], ForwardBatch],
        inputs: DraftInputs,
        sampling: TokenSampling,
        slots: np.ndarray,
        num_tokens: np.ndarray,
        num_fewer: Tensor | None = None,
        most_fewer: int = 0,
    ) -> None:
        """num_fewer: [num_seqs] int64 on the device: tokens that ``num_tokens`` counts and that were rejected.

        most_fewer: those that may have been, of each sequence at most.
        """
        self._plan = plan
        self._inputs = inputs
        self._sampling = sampling
        self._slots = slots
        self._num_tokens = num_tokens
        self._num_fewer = num_fewer
        self._most_fewer = most_fewer

    def batch(self, rows: np.ndarray, token_ids: Sequence[int] | Tensor, ahead: int) -> ForwardBatch:
        positions = self._num_tokens[rows] - 1 + ahead
        tokens = token_ids if isinstance(token_ids, Tensor) else np.asarray(token_ids)
        return self._plan(self._inputs.prepare_one(self._slots[rows], tokens, positions, self._fewer(rows)))

    def _fewer(self, rows: np.ndarray) -> Tensor | None:
        """``num_fewer`` of some."""
        if self._num_fewer is None or len(rows) == len(self._slots):
            return self._num_fewer
        return self._num_fewer.index_select(0, self._inputs.send(rows))

    def nodes(
        self,
        rows: np.ndarray,
        token_ids: Sequence[Sequence[int]] | Tensor,
        parents: Sequence[Sequence[int]] | Tensor,
    ) -> ForwardBatch:
        first, slots = self._num_tokens[rows] - 1, self._slots[rows]
        if isinstance(token_ids, Tensor):
            assert isinstance(parents, Tensor), "tokens and parents are tensors, or neither is"
            if not token_ids.is_cpu:
                fewer = self._fewer(rows)
                return self._plan(self._inputs.prepare_nodes_on_device(slots, token_ids, parents, first, fewer))
            token_ids, parents = token_ids.tolist(), parents.tolist()
        assert not isinstance(parents, Tensor), "tokens and parents are tensors, or neither is"
        trees = [DraftTree(list(tokens), above) for tokens, above in zip(token_ids, parents, strict=True)]
        return self._plan(self._inputs.prepare_nodes(slots, token_ids, trees, first))

    def pick(self, logits: Tensor, rows: np.ndarray, ahead: int) -> list[int]:
        return self.choose(logits, rows, ahead).tolist()

    def choose(self, logits: Tensor, rows: np.ndarray, ahead: int) -> Tensor:
        num_tokens = self._num_tokens[rows] + ahead
        step = StepRows(rows, self._slots[rows], num_tokens, has_drafts=True)
        if not step.sampling_state(self._inputs.table).all_greedy:
            step.num_fewer, step.most_fewer = self._fewer(rows), self._most_fewer
        try:
            picked = self._sampling.choose(logits, step)
        except BlameSequence:  # verification will meet it again, and blame whom it must
            return torch.full((len(rows),), -1, device=logits.device)
        if picked.is_cpu or self._sampling.reads_history(step):
            self._inputs.table.token_ids[step.slots, num_tokens] = np.maximum(picked.tolist(), 0)
        return picked.clone()
