"""SuffixDecoding (Oliaro et al. 2024): the likeliest continuation of a sequence's end in text that was seen before.

The paper keeps suffix trees; here the text itself is searched, which gives the same drafts: one comparison of the whole
text finds where its last token stands, and each further token compares only those places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder, Verified
from fwk_speculative._common import DraftDepth
from fwk_speculative.suffix import SuffixOptions

MAX_PLACES = 1024
"""Most places of a match that are counted: the newest."""


@dataclass(slots=True)
class Guess:
    """A draft, and how many of its tokens are expected to be accepted."""

    token_ids: list[int]
    score: float


class SuffixDecoder(SpeculativeDecoder):
    """Searches each sequence's own tokens, and one store of the outputs of sequences that have ended."""

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        options = context.options or SuffixOptions()
        self._longest = options.speculative_suffix_max_match
        self._factor = options.speculative_suffix_max_factor
        self._least = options.speculative_suffix_min_probability
        self.max_drafts = options.chain_length()
        self._depth = DraftDepth(context.num_slots, self.max_drafts, options.speculative_adaptive)
        self._outputs = OutputStore(options.speculative_suffix_capacity)
        self._table: np.ndarray | None = None
        self._begun = np.zeros(context.num_slots, np.int64)  # where the output of a slot's sequence begins; 0: unknown
        self._known = np.zeros(context.num_slots, np.int64)

    def observe(self, verified: Verified) -> None:
        self._depth.observe(verified)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._table is not None and self._begun[slot]:
                self._outputs.add(self._table[slot, self._begun[slot] : self._known[slot]])
        self._begun[list(slots)] = 0
        self._depth.reset(list(slots))

    def propose(self, view: DraftView) -> Drafts:
        self._table = view.token_ids
        fresh = view.slots[self._begun[view.slots] == 0]
        self._known[view.slots] = view.num_tokens
        self._begun[fresh] = self._known[fresh] - 1  # a sequence's first drafts follow its first output token
        most = np.minimum(view.max_drafts, self._depth.of(view.slots))
        rows = zip(view.slots.tolist(), view.num_tokens.tolist(), most.tolist(), strict=True)
        return Drafts([self._draft(view.token_ids[slot, :length], count) for slot, length, count in rows])

    def _draft(self, tokens: np.ndarray, most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``tokens`` [length] int32."""
        if most <= 0:
            return []
        end = tokens[-self._longest :]
        guesses = [self._guess(text, end, most) for text in (tokens, self._outputs.text)]
        return max(guesses, key=lambda guess: guess.score).token_ids

    def _guess(self, text: np.ndarray, end: np.ndarray, most: int) -> Guess:
        """The likeliest continuation of ``end`` [matched] in ``text`` [length]: after its longest match there."""
        places, matched = longest_match(text, end)
        most = min(most, int(self._factor * matched))
        token_ids: list[int] = []
        probability, score = 1.0, 0.0
        while len(token_ids) < most:
            places = places[places < len(text)]
            following = text[places]
            candidates, counts = np.unique(following[following >= 0], return_counts=True)
            if not len(candidates):
                break
            best = int(counts.argmax())
            probability *= counts[best] / len(following)
            if probability < self._least:
                break
            score += probability
            token_ids.append(int(candidates[best]))
            places = places[following == candidates[best]] + 1
        return Guess(token_ids, score)


class OutputStore:
    """The newest outputs, one after another: a ring of ``capacity`` tokens in which -1 stands after each output."""

    def __init__(self, capacity: int) -> None:
        self._ring = np.full(capacity, -1, np.int32)
        self._next = 0
        self._is_full = False

    @property
    def text(self) -> np.ndarray:
        """What is kept: [at most capacity] int32. No token of an output is followed by another output's."""
        return self._ring if self._is_full else self._ring[: self._next]

    def add(self, tokens: np.ndarray) -> None:
        """Keep an output [length]; the oldest ones make room. Of one longer than the store, its end is kept."""
        capacity = len(self._ring)
        if len(tokens) == 0 or capacity < 2:
            return
        tokens = tokens[-(capacity - 1) :]
        if self._next + len(tokens) + 1 > capacity:  # begin again: what is overwritten in part stays searchable
            self._ring[self._next :] = -1
            self._next, self._is_full = 0, True
        end = self._next + len(tokens)
        self._ring[self._next : end] = tokens
        self._ring[end] = -1
        self._next = end + 1


def longest_match(text: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, int]:
    """Places right after the longest match of a suffix of ``end`` [matched] in ``text`` [length], and its length.

    At most ``MAX_PLACES``, oldest first. A match that ends with the text is none: nothing follows it.
    """
    last = len(text) - 1
    if last < 1 or not len(end):
        return np.zeros(0, np.int64), 0
    found = np.flatnonzero(text[:last] == end[-1])
    if not len(found):
        return found, 0
    matched = 1
    while matched < len(end):
        longer = found[found >= matched]
        longer = longer[text[longer - matched] == end[-1 - matched]]
        if not len(longer):
            break
        found, matched = longer, matched + 1
    return found[-MAX_PLACES:] + 1, matched
