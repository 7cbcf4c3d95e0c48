"""What is accepted of many chains, counted and taken in at once, is what is taken in one by one."""

from __future__ import annotations

import numpy as np
import pytest

from fwk.types import ScheduledSequence
from fwk.worker.runner.sequence_table import SequenceTable
from fwk_speculative.drafting.acceptance import accepted, count_gained
from fwk_speculative.drafting.running_ahead import settle_chains


def chains(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Drafts of 1 to 4 tokens for 5 sequences, and what is picked: few tokens, so that some are right."""
    draw = np.random.default_rng(seed)
    drafts = [draw.integers(0, 2, draw.integers(1, 5)).tolist() for _ in range(5)]
    return drafts, [draw.integers(0, 2, len(some) + 1).tolist() for some in drafts]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("has_states", [False, True])
def test_at_once_is_one_by_one(seed: int, has_states: bool) -> None:
    drafts, picked = chains(seed)
    counts = np.array([len(some) for some in drafts])
    gained = count_gained(np.concatenate(drafts), np.concatenate([some[:-1] for some in picked]), counts)
    wanted = [accepted(mine, some) for mine, some in zip(drafts, picked, strict=True)]
    assert gained.tolist() == [len(tokens) for tokens in wanted]
    one, many = (SequenceTable(8, 64, 4, has_states=has_states) for _ in range(2))
    slots = np.array([6, 1, 3, 0, 2])
    for table in (one, many):
        table.num_tokens[:] = np.arange(8) + 5
        table.num_computed[:] = np.arange(8) + 4
    for slot, mine, tokens in zip(slots.tolist(), drafts, wanted, strict=True):
        one.finish(ScheduledSequence(slot, 1 + len(mine), True, [], mine), tokens)
    settle_chains(many, slots, counts + 1, counts, gained, np.concatenate(wanted))
    for name in ("num_tokens", "num_computed", "token_ids"):
        np.testing.assert_array_equal(getattr(many, name), getattr(one, name), name)
