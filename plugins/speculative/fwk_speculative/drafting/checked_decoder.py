"""A speculative decoder as a worker asks it: one that fails drafts no more, and its name is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from operator import index
from typing import Any, cast

import numpy as np
from torch import Tensor

from fwk.errors import PluginFault, in_range, one_line_traceback
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeDecoder, TargetStep, Verified
from fwk.types import ForwardBatch

log = logging.getLogger(__name__)


class CheckedDecoder:
    """The decoder until it raises, or drafts what no target could verify; then requests continue without drafts."""

    def __init__(self, decoder: SpeculativeDecoder, vocab_size: int, name: str, failed: Callable[[str], None]) -> None:
        """name: for messages, with its package. failed: told once why it drafts no more; it may raise."""
        self._decoder, self._vocab_size, self._name, self._failed = decoder, vocab_size, name, failed
        self._is_on = True
        self.draws_too_late = False
        """Whether probabilities of its drafts would be read before they are there: it drafts ahead or late."""
        if type(decoder).follow is SpeculativeDecoder.follow:  # which does nothing, so that steps can be captured
            self.follow = decoder.follow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def follow(self, batch: ForwardBatch) -> None:
        self._tell("follow", batch)

    def learn(self, step: TargetStep) -> None:
        self._tell("learn", step)

    def observe(self, verified: Verified) -> None:
        self._tell("observe", verified)

    def forget(self, slots: Sequence[int]) -> None:
        self._tell("forget", slots)

    def propose(self, view: DraftView) -> Drafts:
        if self._is_on:
            try:
                drafts = self._decoder.propose(view)
                why = self._wrong(drafts, len(view.slots))
                if why is None:
                    return drafts
                self._stop(f"{why} in propose", why)
            except (Exception, SystemExit) as error:
                self._raised(error, "propose")
        return Drafts([[] for _ in view.slots])

    def _tell(self, event: str, what: Any) -> None:
        if self._is_on:
            try:
                getattr(self._decoder, event)(what)
            except (Exception, SystemExit) as error:
                self._raised(error, event)

    def _raised(self, error: BaseException, where: str) -> None:
        why = str(error) if isinstance(error, PluginFault) else f"raised {type(error).__name__}"
        self._stop(f"{why} in {where}", one_line_traceback(error))

    def _stop(self, why: str, detail: str) -> None:
        self._is_on = False
        sentence = f"speculative decoder {self._name} {why}; requests continue without drafts"
        log.error("%s: %s", sentence, detail)
        self._failed(sentence)

    def _wrong(self, drafts: Any, num_seqs: int) -> str | None:
        """Why these are no drafts of so many sequences, as a predicate."""
        if not isinstance(drafts, Drafts):
            return f"answered a {type(drafts).__name__}, no Drafts,"
        tokens, parents = drafts.token_ids, drafts.parents
        if isinstance(tokens, Tensor):
            return self._wrong_tensors(drafts, tokens, num_seqs)
        return "answered parents in a tensor" if isinstance(parents, Tensor) else self._wrong_lists(drafts, num_seqs)

    def _wrong_lists(self, drafts: Drafts, num_seqs: int) -> str | None:
        tokens, parents = cast("list[list[int]]", drafts.token_ids), cast("list[list[int]] | None", drafts.parents)
        if len(tokens) != num_seqs or (parents is not None and [*map(len, parents)] != [*map(len, tokens)]):
            return f"answered drafts of {len(tokens)} sequences, or parents of others than they, not of {num_seqs}"
        for token in chain.from_iterable(tokens):
            if not 0 <= index(token) < self._vocab_size:
                return f"answered the token {token}, outside 0 to {self._vocab_size - 1},"
        for place, parent in chain.from_iterable(map(enumerate, parents or ())):
            if not -1 <= index(parent) < place:
                return f"answered the parent {parent} of draft {place}, which does not come before it,"
        rows, drawn = sum(map(len, tokens)), drafts.probabilities
        if drawn is not None and drawn.shape != (rows, self._vocab_size):
            return f"answered probabilities {list(drawn.shape)}, not {[rows, self._vocab_size]},"
        if drawn is not None and parents is not None:
            return "answered probabilities of drafts in a tree, where only those of chains may be drawn,"
        if drawn is not None and self.draws_too_late:
            return "answered probabilities of drafts that are made ahead or late"
        return None

    def _wrong_tensors(self, drafts: Drafts, tokens: Tensor, num_seqs: int) -> str | None:
        counts, parents = drafts.counts, drafts.parents
        if tokens.dim() != 2 or tokens.shape[0] != num_seqs or counts is None or counts.shape != (num_seqs,):
            return f"answered {list(tokens.shape)} tokens, or counts of others, not of {num_seqs} sequences"
        if np.any(counts < 0) or np.any(counts > tokens.shape[1]):
            return f"answered counts outside 0 to {tokens.shape[1]}"
        if parents is not None and (not isinstance(parents, Tensor) or parents.shape != tokens.shape):
            return "answered parents of another shape than its tokens"
        return in_range(tokens, self._vocab_size, "the token", -1)


def fault_of(group_size: int, troubles: list[str]) -> Callable[[str], None]:
    """What becomes of a decoder's failure: a line of ``troubles``; among several ranks, which must all do the same, the
    end of the engine."""

    def failed(sentence: str) -> None:
        if group_size > 1:
            raise PluginFault(sentence)
        troubles.append(sentence)

    return failed
