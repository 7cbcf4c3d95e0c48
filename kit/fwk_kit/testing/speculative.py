"""What every speculative decoder must do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from fwk.interfaces.declaration import Facts
from fwk.interfaces.speculative import (
    Drafts,
    DraftView,
    SpeculativeContext,
    SpeculativeDecoder,
    SpeculativeDecoderSpec,
    Verified,
)
from fwk.plugins import Registered, choose
from fwk_kit.testing.base import installed
from fwk_kit.testing.served import ServedSuite

SLOTS, MAX_LEN, VOCAB = 6, 96, 120


class SpeculativeDecoderSuite(ServedSuite):
    """Proposals within their bounds, and an engine that says the same with and without.

    needs_model: set it for a decoder that runs a model of its own: its proposals are then made in an engine only.
    """

    family = "speculative"
    interface = SpeculativeDecoder
    needs_model = False

    def decoder(self, item: Registered) -> SpeculativeDecoder:
        """A decoder without a model."""
        if self.needs_model:
            pytest.skip("needs a model: set served_request, and name the model in serve_with")

        def nothing(name: str) -> Any:
            raise AssertionError(f"it loads the model {name!r}: set needs_model")

        return self.make(item, SpeculativeContext(SLOTS, MAX_LEN, VOCAB, nothing, self.given(item)))

    def propose(self, decoder: SpeculativeDecoder, texts: Sequence[Sequence[int]], most: int) -> Drafts:
        """Drafts for sequences in slots counted from the last, checked against what a proposal may be."""
        table = np.full((SLOTS, MAX_LEN + 1), -7, np.int32)  # past a text's end is another's rubbish
        slots = np.array([SLOTS - 1 - i for i in range(len(texts))], np.int64)
        for slot, text in zip(slots, texts, strict=True):
            table[slot, : len(text)] = text
        lengths = np.array([len(text) for text in texts], np.int64)
        before = table.copy()
        limits, nowhere, names = np.full(len(texts), most, np.int64), cast(Any, None), [""] * SLOTS
        drafts = decoder.propose(DraftView(slots, lengths, limits, table, nowhere, namespaces=names))
        assert np.array_equal(table, before), "propose() changed the sequences"
        assert len(drafts.token_ids) == len(texts), "a list for each sequence, empty or not"
        for i, tokens in enumerate(drafts.token_ids):
            assert len(tokens) <= min(most, decoder.max_drafts), f"{len(tokens)} drafts, at most {most} were asked for"
            assert all(0 <= token < VOCAB for token in tokens), f"drafts {tokens} are not in the vocabulary"
            if drafts.parents is not None:
                parents = drafts.parents[i]
                assert len(parents) == len(tokens)
                assert all(-1 <= parent < place for place, parent in enumerate(parents)), f"parents {parents}"
        return drafts

    def texts(self) -> list[list[int]]:
        """What is drafted after: repetitive, short and random texts."""
        rng = np.random.default_rng(3)
        return [[1, 2, 3, 4] * 8, [5], [9, 9, 9], rng.integers(0, VOCAB, 40).tolist(), [1, 2, 3, 4] * 8 + [1, 2]]

    def exercise(self, item: Registered) -> None:
        if not self.needs_model:
            self.test_proposals_keep_their_bounds(item)

    def test_proposals_keep_their_bounds(self, item: Registered) -> None:
        decoder = self.decoder(item)
        assert decoder.max_drafts >= 1
        for most in (64, 3, 1, 0):
            for count in (5, 1):
                self.propose(decoder, self.texts()[:count], most)

    def test_a_sequence_gets_the_same_drafts_beside_others(self, item: Registered) -> None:
        together = self.propose(self.decoder(item), self.texts(), 8).token_ids
        for i, text in enumerate(self.texts()):
            assert self.propose(self.decoder(item), [text], 8).token_ids[0] == together[i]

    def test_no_sequences(self, item: Registered) -> None:
        assert self.propose(self.decoder(item), [], 8).token_ids == []

    def test_takes_news_of_what_was_kept_and_who_is_gone(self, item: Registered) -> None:
        decoder = self.decoder(item)
        for kept in (0, 1, 3):
            drafts = self.propose(decoder, self.texts(), 8).token_ids
            counts = np.array([len(tokens) for tokens in drafts])
            slots = np.array([SLOTS - 1 - i for i in range(len(drafts))])
            decoder.observe(Verified(slots, counts, np.minimum(counts, kept)))
        decoder.forget(list(range(SLOTS)))
        assert (
            self.propose(decoder, self.texts(), 8).token_ids
            == self.propose(self.decoder(item), self.texts(), 8).token_ids
        ), "a sequence in a slot that was given back is drafted for as the one before it"

    def test_what_it_asks_of_attention_can_be_had(self, item: Registered) -> None:
        assert isinstance(item.declaration, SpeculativeDecoderSpec)
        features = item.declaration.required_features(self.given(item))
        assert isinstance(features, frozenset)
        choose(installed(), "attention", "auto", Facts(head_size=16, num_kv_heads=2, features=features))
