"""Prompt look-up decoding (Saxena 2023; Yang et al. 2023, "Inference with Reference"), as chains or trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fwk.errors import ConfigError
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder, Verified
from fwk_speculative._common import DraftDepth
from fwk_speculative.ngram import NgramOptions


class NgramDecoder(SpeculativeDecoder):
    """Looks in each sequence's own tokens for its last few, and drafts what came next there."""

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        options = context.options or NgramOptions()
        self._shortest = options.speculative_ngram_min_match_window_size
        self._longest = options.speculative_ngram_max_match_window_size
        self._breadth = options.speculative_ngram_max_bfs_breadth
        if self._shortest > self._longest:
            raise ConfigError(
                f"--speculative-ngram-min-match-window-size {self._shortest} is larger than "
                f"--speculative-ngram-max-match-window-size {self._longest}"
            )
        self.max_drafts = options.chain_length()
        self._depth = DraftDepth(context.num_slots, self.max_drafts, options.speculative_adaptive)

    def observe(self, verified: Verified) -> None:
        self._depth.observe(verified)

    def forget(self, slots: Sequence[int]) -> None:
        self._depth.reset(list(slots))

    def propose(self, view: DraftView) -> Drafts:
        most = np.minimum(view.max_drafts, self._depth.of(view.slots))
        token_ids: list[list[int]] = []
        parents: list[list[int]] = []
        for slot, length, count in zip(view.slots.tolist(), view.num_tokens.tolist(), most.tolist(), strict=True):
            tokens = view.token_ids[slot, :length]
            starts = self._places(tokens) if count > 0 else []
            drafted, above = _merged([tokens[start : start + count].tolist() for start in starts], count)
            token_ids.append(drafted)
            parents.append(above)
        return Drafts(token_ids, parents if self._breadth > 1 else None)

    def _places(self, tokens: np.ndarray) -> list[int]:
        """Where continuations of the last tokens begin: after their longest match, the newest first.

        tokens: [length] int32. At most ``breadth`` places, each with another next token.
        """
        last = len(tokens) - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])  # where a match ends
        matched = 0
        while len(ends) and matched < self._longest:
            matched += 1
            longer = ends[ends >= matched]
            longer = longer[tokens[longer - matched] == tokens[last - matched]]
            if not len(longer):
                break
            ends = longer
        if matched < self._shortest or not len(ends):
            return []
        found: dict[int, int] = {}
        for end in ends[::-1].tolist():
            found.setdefault(int(tokens[end + 1]), end + 1)
            if len(found) == self._breadth:
                break
        return list(found.values())


def _merged(branches: list[list[int]], most: int) -> tuple[list[int], list[int]]:
    """Continuations as one tree of at most ``most`` tokens, level by level: its tokens, and the parent of each."""
    token_ids: list[int] = []
    parents: list[int] = []
    at = [-1] * len(branches)
    for level in range(max(map(len, branches), default=0)):
        for i, branch in enumerate(branches):
            if level < len(branch) and len(token_ids) < most:
                parents.append(at[i])  # the branches differ in their first token, so they never meet again
                at[i] = len(token_ids)
                token_ids.append(branch[level])
    return token_ids, parents
