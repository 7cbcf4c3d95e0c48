"""Which sequences run ahead of drafts that are being verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fwk.interfaces.drafting import DraftingParts
from fwk.interfaces.speculative import Acceptance
from fwk_speculative.drafting.acceptance import EXACT
from fwk_speculative.drafting.drafting import DecoderDrafting
from fwk_speculative.drafting.part_drafts import NoPartDrafts
from fwk_speculative.drafting.running_ahead import RunningAhead


def drafting(*, acceptance: Acceptance = EXACT, needs_lengths: bool = False, late: bool = True) -> DecoderDrafting:
    """Of two sequences, the first one greedy; as the parts of a worker say."""
    decoder: Any = SimpleNamespace(
        acceptance=acceptance, max_drafts=2, max_levels=2, reads_hidden=False, drafts_late=True, drafts_trees=False
    )
    decoder.forget = lambda slots: None
    parts = (SimpleNamespace(needs_lengths=needs_lengths),)
    table: Any = SimpleNamespace(
        num_tokens=np.zeros(2, np.int64), is_greedy=np.array([True, False]), parts_of=lambda slots: parts
    )
    sampling: Any = SimpleNamespace(may_be_late=lambda slot: late)
    inputs: Any = SimpleNamespace(send=torch.from_numpy)
    nothing: Any = None
    made = DraftingParts(table, inputs, sampling, nothing, nothing, nothing, 0)
    ahead = RunningAhead(table, torch.from_numpy, torch.device("cpu"), 2)
    return DecoderDrafting(decoder, made, NoPartDrafts(), ahead, runs_ahead=True)


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ({}, [True, True]),
        ({"acceptance": Acceptance(single=0.5)}, [True, False]),
        ({"needs_lengths": True}, [False, False]),
        ({"late": False}, [False, False]),
    ],
)
def test_a_sequence_runs_ahead_only_where_nobody_needs_to_know_its_length(
    what: dict[str, Any], wanted: list[bool]
) -> None:
    made = drafting(**what)
    for slot in (0, 1):
        made.begin(slot)
    assert made.ahead.slots.tolist() == wanted
    made.forget([0, 1])
    assert not made.ahead.slots.any()
