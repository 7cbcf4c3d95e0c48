"""SuffixDecoding (Oliaro et al. 2024): the likeliest continuation of a sequence's end in text that was seen before.

The paper keeps suffix trees; here the text itself is searched, which gives the same drafts: one comparison of the whole
text finds where its last token stands, and each further token compares only those places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder, Verified
from fwk_speculative._common import DraftDepth
from fwk_speculative._common.matches import longest_match
from fwk_speculative._common.outputs import Outputs
from fwk_speculative._common.worth import Worth
from fwk_speculative.suffix import SuffixOptions


@dataclass(slots=True)
class Guess:
    """A draft, and how many of its tokens are expected to be accepted."""

    token_ids: list[int]
    score: float


class SuffixDecoder(SpeculativeDecoder):
    """Searches each sequence's own tokens, and the outputs of sequences of its cache namespace that have ended."""

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        options = context.options or SuffixOptions()
        self._longest = options.speculative_suffix_max_match
        self._factor = options.speculative_suffix_max_factor
        self._least = options.speculative_suffix_min_probability
        self.max_drafts = options.chain_length()
        self.acceptance = options.acceptance()
        self.drafts_ahead = True
        self._depth = DraftDepth(context.num_slots, self.max_drafts, options.speculative_adaptive)
        is_on = context.is_host and options.speculative_adaptive
        self._worth = Worth(context.num_slots, self.max_drafts, is_on=is_on)
        self._outputs = Outputs(context.num_slots, options.speculative_suffix_capacity)

    def observe(self, verified: Verified) -> None:
        self._depth.observe(verified)
        self._worth.observe(verified)

    def forget(self, slots: Sequence[int]) -> None:
        self._outputs.forget(slots)
        self._depth.reset(list(slots))
        self._worth.reset(slots)

    def propose(self, view: DraftView) -> Drafts:
        self._outputs.follow(view)
        most = self._worth.counts(view, np.minimum(view.max_drafts, self._depth.of(view.slots)))
        drafts: list[list[int]] = [[] for _ in view.slots]
        longest = most + view.ahead
        for i in np.flatnonzero(most > 0).tolist():
            slot = int(view.slots[i])
            others = self._outputs.text(slot)
            drafts[i] = self._draft(view.token_ids[slot, : view.num_tokens[i]], others, int(longest[i]))
        return Drafts(self._worth.kept(view, drafts))

    def _draft(self, tokens: np.ndarray, others: np.ndarray, most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``tokens`` [length] int32; ``others`` are earlier outputs."""
        if most <= 0:
            return []
        end = tokens[-self._longest :]
        guesses = [self._guess(text, end, most) for text in (tokens, others)]
        return max(guesses, key=lambda guess: guess.score).token_ids

    def _guess(self, text: np.ndarray, end: np.ndarray, most: int) -> Guess:
        """The likeliest continuation of ``end`` [matched] in ``text`` [length]: after its longest match there.

        Once all places have reached the text's own end, the continuation copies its own drafts, as in LZ77. Outputs of
        others end in -1, which nothing follows.
        """
        places, matched = longest_match(text, end)
        most = min(most, int(self._factor * matched))
        token_ids: list[int] = []
        probability, score = 1.0, 0.0
        while len(token_ids) < most:
            places = places[places < len(text)]
            if not len(places):  # the last match to reach the end gives the period
                score += probability * (most - len(token_ids))
                return Guess(list(islice(cycle(token_ids), most)), score)
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
