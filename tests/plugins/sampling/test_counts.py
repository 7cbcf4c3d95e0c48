"""Counts of tokens, as penalties on a device and on a CPU read them."""

from __future__ import annotations

import numpy as np

from fwk.interfaces.sampling import LogitsView
from fwk_sampling.processors.counts import TokenCounts

PROMPT = 3


def view(token_ids: np.ndarray, lengths: list[int]) -> LogitsView:
    count = len(lengths)
    return LogitsView(np.arange(count), np.array(lengths), np.full(count, PROMPT), token_ids)


def test_a_table_holds_the_entries_of_each_row() -> None:
    rng = np.random.default_rng(1)
    token_ids = rng.integers(0, 6, (4, 40)).astype(np.int32)
    wants_prompt = np.array([True, False, False, True])
    one, other = TokenCounts(4), TokenCounts(4)
    rows = np.arange(4)
    for step in range(12):
        lengths = [PROMPT + step, PROMPT, PROMPT + 2 * step, PROMPT + 1 + step]  # one is empty, one jumps
        owner, ids, counts = one.of(view(token_ids, lengths), rows, wants_prompt)
        table_ids, table_counts = other.table(view(token_ids, lengths), rows, wants_prompt)
        for row in rows.tolist():
            mine = owner == row
            entries = set(zip(ids[mine].tolist(), counts[mine].tolist(), strict=True))
            found = set(zip(table_ids[row].tolist(), table_counts[row].tolist(), strict=True))
            assert found == (entries or {(0, 0)})


def test_a_table_of_nothing_is_empty() -> None:
    ids, counts = TokenCounts(1).table(view(np.zeros((1, 8), np.int32), [PROMPT]), np.arange(1), np.array([False]))
    assert ids.shape == counts.shape == (1, 0)
