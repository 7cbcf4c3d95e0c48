"""Prompt look-up decoding (Saxena 2023; Yang et al. 2023, "Inference with Reference"), as chains or trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fwk.errors import ConfigError
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder, Verified
from fwk_speculative._common import DraftDepth
from fwk_speculative._common.corpus import Corpus, read_corpus
from fwk_speculative._common.matches import copied, longest_match, newest_matches
from fwk_speculative._common.outputs import Outputs
from fwk_speculative._common.worth import Worth
from fwk_speculative.ngram import NgramOptions


class NgramDecoder(SpeculativeDecoder):
    """Looks in each sequence's own tokens for its last few, and drafts what came next there.

    A copy that reaches the text's end continues with its own drafts (``copied``), so text that repeats itself is
    drafted as far as it is asked, also while a step is in flight that adds more tokens than it repeats.
    """

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        options = context.options or NgramOptions()
        self._shortest = options.speculative_ngram_min_match_window_size
        self._longest = options.speculative_ngram_max_match_window_size
        self._breadth = options.speculative_ngram_max_bfs_breadth
        self._least = options.speculative_ngram_min_bfs_breadth
        self._by_frequency = options.speculative_ngram_match_type == "PROB"
        self._branch = options.speculative_ngram_branch_length
        self._outputs = Outputs(context.num_slots, options.speculative_ngram_capacity)
        if self._least > self._breadth:
            raise ConfigError(
                f"--speculative-ngram-min-bfs-breadth {self._least} is larger than "
                f"--speculative-ngram-max-bfs-breadth {self._breadth}"
            )
        if self._shortest > self._longest:
            raise ConfigError(
                f"--speculative-ngram-min-match-window-size {self._shortest} is larger than "
                f"--speculative-ngram-max-match-window-size {self._longest}"
            )
        self._corpus: Corpus | None = None
        self._budget = options.speculative_ngram_external_sam_budget
        path = options.speculative_ngram_external_corpus_path
        if path is not None:
            assert context.encode is not None
            self._corpus = read_corpus(path, context.encode, options.speculative_ngram_external_corpus_max_tokens)
        elif self._budget is not None:
            raise ConfigError(
                "--speculative-ngram-external-sam-budget is of a corpus: give --speculative-ngram-external-corpus-path"
            )
        self.max_drafts = options.chain_length()
        self.acceptance = options.acceptance()
        self.drafts_ahead, self.drafts_trees = True, self._breadth > 1
        self._depth = DraftDepth(context.num_slots, self.max_drafts, options.speculative_adaptive)
        is_on = context.is_host and options.speculative_adaptive and self._breadth == 1
        self._worth = Worth(context.num_slots, self.max_drafts, is_on=is_on)

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
        token_ids: list[list[int]] = [[] for _ in view.slots]
        parents: list[list[int]] = [[] for _ in view.slots]
        ahead = np.broadcast_to(view.ahead, most.shape)
        left = np.flatnonzero(most > 0)
        if self._breadth == 1 and not self._by_frequency:
            left = self._follow_newest(view, np.minimum(most, self._branch) + ahead, left, token_ids)
        for i in left.tolist():
            slot = int(view.slots[i])
            tokens, others = view.token_ids[slot, : view.num_tokens[i]], self._outputs.text(slot)
            if self._breadth > 1:
                token_ids[i], parents[i] = self._tree(tokens, others, int(most[i]), int(ahead[i]))
            else:
                token_ids[i] = next(iter(self._branches(tokens, others, int(most[i]), int(ahead[i]))), [])
        return Drafts(self._worth.kept(view, token_ids), parents if self._breadth > 1 else None)

    def _follow_newest(
        self, view: DraftView, counts: np.ndarray, rows: np.ndarray, token_ids: list[list[int]]
    ) -> np.ndarray:
        """``_branches`` of many sequences at once, where one continuation is followed.

        counts: [num_seqs] int64, tokens to copy; rows: of the sequences to look up. Those that have a match get
        ``token_ids``; the others are returned, where there is other text to look at.
        """
        slots, lengths = view.slots[rows], view.num_tokens[rows]
        places, matched = newest_matches(view.token_ids, slots, lengths, self._longest)
        is_found = matched >= self._shortest
        for row, slot, length, place, count in zip(
            rows[is_found].tolist(),
            slots[is_found].tolist(),
            lengths[is_found].tolist(),
            places[is_found].tolist(),
            counts[rows[is_found]].tolist(),
            strict=True,
        ):
            token_ids[row] = copied(view.token_ids[slot, :length], place, count)
        has_others = not self._outputs.is_empty or self._corpus is not None
        return rows[~is_found] if has_others else rows[:0]

    def _tree(self, tokens: np.ndarray, others: np.ndarray, most: int, ahead: int) -> tuple[list[int], list[int]]:
        """The branches after ``tokens`` as a tree, or after their first one where it is ``ahead`` tokens further."""
        first: list[int] = []
        if ahead:
            first = next(iter(self._branches(tokens, others, 0, ahead)), [])
            if len(first) < ahead:
                return first, list(range(-1, len(first) - 1))
            tokens = np.concatenate((tokens, np.array(first, tokens.dtype)))
        token_ids, parents = _merged(self._branches(tokens, others, most, 0), most)
        above = [parent + ahead for parent in parents]
        return first + token_ids, [*range(-1, ahead - 1), *above]

    def _branches(self, tokens: np.ndarray, others: np.ndarray, most: int, ahead: int) -> list[list[int]]:
        """Continuations of ``tokens`` [length] int32: ``ahead`` tokens, and at most ``most`` that are drafted.

        Its own, or else those of earlier outputs (``others``), or else those of the corpus.
        """
        count, end = min(most, self._branch) + ahead, tokens[-self._longest :]
        starts = self._starts(tokens, *longest_match(tokens, end))
        if starts:
            return [copied(tokens, start, count) for start in starts]
        text = others
        starts = self._starts(text, *longest_match(text, end))
        if not starts and self._corpus is not None:
            if self._budget is not None:
                count = min(count, self._budget + ahead)
            text = self._corpus.text
            starts = self._starts(text, *self._corpus.longest_match(end))
        return [_until_end(text[start : start + count].tolist()) for start in starts]

    def _starts(self, text: np.ndarray, places: np.ndarray, matched: int) -> list[int]:
        """Where continuations begin in ``text``: places after its longest match, each with another next token.

        The newest come first, or those of the most frequent next token. After a longer match fewer are followed.
        """
        if matched < self._shortest or not len(places):
            return []
        newest: dict[int, int] = {}
        counts: dict[int, int] = {}
        for place in places[::-1].tolist():
            token = int(text[place])
            if token >= 0:
                newest.setdefault(token, place)
                counts[token] = counts.get(token, 0) + 1
            if len(newest) == self._breadth and not self._by_frequency:
                break
        order = sorted(newest, key=lambda token: -counts[token]) if self._by_frequency else list(newest)
        span = max(self._longest - self._shortest, 1)
        fewer = (self._breadth - self._least) * (matched - self._shortest) // span
        return [newest[token] for token in order[: self._breadth - fewer]]


def _until_end(tokens: list[int]) -> list[int]:
    """Tokens up to the end of the output they are from."""
    return tokens[: tokens.index(-1)] if -1 in tokens else tokens


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
