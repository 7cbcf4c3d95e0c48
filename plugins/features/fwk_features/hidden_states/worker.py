"""The part in each worker: copies of the hidden states of the tokens of sequences that asked for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.feature import WorkerPart, WorkerPartContext
from fwk.types import Batch, ForwardBatch, NewSequence
from fwk_features.hidden_states import StepStates, Wanted


@dataclass(frozen=True, slots=True)
class _Copied:
    """states: [num_tokens, hidden_size] of a sequence's tokens in a step, from the one at ``start`` on, on the host."""

    slot: int
    start: int
    states: Tensor


class HiddenStatesWorker(WorkerPart):
    """Every step of such a sequence counts: prompts, next tokens and drafts."""

    needs_lengths = True

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._slots: set[int] = set()

    def begin(self, new: NewSequence, asked: Wanted) -> None:
        self._slots.add(new.slot)

    def forget(self, slot: int) -> None:
        self._slots.discard(slot)

    def wants_hidden(self, slots: np.ndarray) -> bool:
        return True  # it is asked of steps with such a sequence alone

    def computed(
        self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None
    ) -> Sequence[_Copied] | None:
        starts, lengths = forward.query_start_np, forward.seq_lens_np
        found: list[_Copied] = []
        for i, scheduled in enumerate(batch.sequences):
            if scheduled.slot in self._slots:
                begin, end = int(starts[i]), int(starts[i + 1])
                own = hidden[begin:end].clone(memory_format=torch.contiguous_format)
                found.append(_Copied(scheduled.slot, int(lengths[i]) - (end - begin), self.context.to_host(own)))
        return found or None

    def results(self, made: Sequence[_Copied]) -> Mapping[int, StepStates]:
        return {
            one.slot: StepStates(one.start, [row.tobytes() for row in one.states.to(torch.float32).numpy()])
            for one in made
        }
