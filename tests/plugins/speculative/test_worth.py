"""Drafts of chains are cut to what pays for its rows."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from fwk.interfaces.speculative import DraftView, SpeculativeContext, Verified
from fwk_speculative._common import DraftOptions
from fwk_speculative._common.worth import FEW, PAUSE
from fwk_speculative.ngram import NgramOptions
from fwk_speculative.ngram.decoder import NgramDecoder
from fwk_speculative.suffix import SuffixOptions
from fwk_speculative.suffix.decoder import SuffixDecoder

LENGTH = 400


class Loop:
    """Sequences of which the model writes ``texts``: a decoder's drafts are verified against them."""

    def __init__(self, kind: type[Any], options: DraftOptions, texts: list[list[int]], *, is_host: bool = True) -> None:
        given = SpeculativeContext(len(texts), LENGTH, 1000, cast(Any, None), options, is_host=is_host)
        self.decoder = kind(given)
        self.slots = np.arange(len(texts))
        self.table = np.zeros((len(texts), LENGTH + 1), np.int32)
        for slot, text in enumerate(texts):
            self.table[slot, : len(text)] = text
        self.ends = np.array([len(text) for text in texts])
        self.lengths = np.full(len(texts), 40)
        self.drafted = self.accepted = 0

    def run(self, steps: int) -> list[int]:
        """Rows of drafts in each step."""
        rows: list[int] = []
        for _ in range(steps):
            view = DraftView(self.slots, self.lengths, self.ends - self.lengths - 2, self._known(), cast(Any, None))
            drafts = self.decoder.propose(view).token_ids
            rows.append(sum(map(len, drafts)))
            kept = [self._kept(slot, tokens) for slot, tokens in enumerate(drafts)]
            self.lengths = self.lengths + 1 + kept
            counts = np.array([len(tokens) for tokens in drafts])
            self.decoder.observe(Verified(self.slots, counts, np.array(kept)))
            self.accepted += sum(kept)
        return rows

    def _known(self) -> np.ndarray:
        """The table as the decoder sees it: what comes is not in it yet."""
        known = self.table.copy()
        for slot, length in enumerate(self.lengths.tolist()):
            known[slot, length:] = 999
        return known

    def _kept(self, slot: int, drafts: list[int]) -> int:
        coming = self.table[slot, self.lengths[slot] : self.lengths[slot] + len(drafts)].tolist()
        return next((i for i, pair in enumerate(zip(coming, drafts, strict=True)) if pair[0] != pair[1]), len(drafts))


def free_text(seed: int) -> list[int]:
    """Words that came before, in an order of their own: matches are found, and are wrong."""
    return np.random.default_rng(seed).integers(1, 30, LENGTH).tolist()


def copied(seed: int) -> list[int]:
    """A text that is repeated."""
    return (np.random.default_rng(seed).integers(1, 900, 60).tolist() * 8)[:LENGTH]


KINDS = {"ngram": (NgramDecoder, NgramOptions), "suffix": (SuffixDecoder, SuffixOptions)}


@pytest.mark.parametrize("name", KINDS)
def test_at_many_at_once_free_text_costs_next_to_no_rows(name: str) -> None:
    kind, options = KINDS[name]
    texts = [free_text(seed) for seed in range(32)]
    before = sum(Loop(kind, options(), texts, is_host=False).run(200))
    assert sum(Loop(kind, options(), texts).run(200)) < min(0.1 * before, 0.01 * 32 * 200)
    assert sum(Loop(kind, options(), texts[:FEW]).run(200)) > 0.5 * before * FEW / 32
    fixed = Loop(kind, options(speculative_adaptive=False), texts)
    assert sum(fixed.run(20)) > 0.5 * 32 * 20


@pytest.mark.parametrize("name", KINDS)
def test_what_repeats_is_found_without_rows_and_then_drafted(name: str) -> None:
    kind, options = KINDS[name]
    loop = Loop(kind, options(), [*[copied(seed) for seed in range(8)], *[free_text(seed) for seed in range(24)]])
    rows = loop.run(60)
    assert rows[0] == 0
    assert loop.accepted > 0.9 * sum(rows) > 0
    assert (loop.lengths[:8] > 40 + 1.5 * 60).all()
    assert (loop.lengths[8:] <= 40 + 60 + 3).all()


def test_a_sequence_that_does_not_pay_is_looked_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(NgramDecoder, NgramOptions(), [free_text(seed) for seed in range(32)])
    found: list[int] = []
    look = loop.decoder._follow_newest

    def counted(view: DraftView, longest: Any, rows: Any, token_ids: list[list[int]]) -> Any:
        found.extend(rows.tolist())
        return look(view, longest, rows, token_ids)

    monkeypatch.setattr(loop.decoder, "_follow_newest", counted)
    loop.run(100)
    assert 0 < len(found) <= 32 * (100 / PAUSE + 1)
