"""What is kept of a step with drafts until its tokens are known: ``LaunchedStep.drafts``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.step import LaunchedStep, SequenceRecords, StepRows
from fwk.types import ForwardBatch
from fwk_speculative.drafting.draft_store import StoredDrafts
from fwk_speculative.drafting.draft_tree import DraftTree


@dataclass(slots=True)
class LateRows:
    """Where the sequences of a launched step stand.

    computed: [num_seqs] int64, tokens before it, as if no draft of the step before it was rejected; num_fewer:
    [num_seqs] int64 on the device, those that were; token_ids: [num_tokens] int64, its input, and kv_places, for each
    KV group, [num_tokens] int64, where its K/V are, while no other step is prepared.

    order: [num_tokens] int64 on the device, where drafts are trees and tokens were chosen: the order in which the
    tokens stand, each tree's accepted drafts before the others; None: their own.
    """

    computed: np.ndarray
    num_fewer: Tensor
    token_ids: Tensor
    kv_places: list[Tensor]
    order: Tensor | None = None

    @classmethod
    def of(
        cls, table: SequenceRecords, forward: ForwardBatch, rows: StepRows, send: Callable[[np.ndarray], Tensor]
    ) -> LateRows:
        """Of a step whose pass was launched."""
        assert rows.plan is not None
        slots = rows.plan[0]
        if forward.num_fewer is None:
            num_fewer = torch.zeros(len(slots), dtype=torch.int64, device=forward.token_ids.device)
        elif forward.is_static:
            num_fewer = forward.num_fewer.index_select(0, send(rows.query_start[:-1]))
        else:
            num_fewer = forward.num_fewer
        places = [group.slot_mapping for group in forward.kv_groups]
        return cls(table.num_computed[slots], num_fewer, forward.token_ids, places)


@dataclass(slots=True)
class StepNotes:
    """Of one step.

    trees: those among its drafts that the host knows, by slot. stored: drafts that it does not know.
    late: what sequences that run ahead are drafted for from, and accepted paths are moved by, where that is done when
    tokens are chosen. early: drafts that were made so, by slot: for the step after this one.
    """

    trees: dict[int, DraftTree] = field(default_factory=dict[int, DraftTree])
    stored: StoredDrafts | None = None
    late: LateRows | None = None
    early: dict[int, int] = field(default_factory=dict[int, int])

    @staticmethod
    def of(step: LaunchedStep) -> StepNotes:
        """Those of a step with drafts, or of a decoder's."""
        assert isinstance(step.drafts, StepNotes)
        return step.drafts
