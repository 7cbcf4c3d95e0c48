"""Beam search over log-probabilities: which texts to continue, and which are done.

Scores and the rules of when to stop are those of transformers' ``generate(num_beams=...)``: a hypothesis' score is the
sum of its tokens' log-probabilities divided by its length to the power of ``length_penalty``; a candidate that ends
counts only if it is among the best ``width`` candidates of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fwk.errors import InvalidRequest
from fwk.types.request import TokenLogprobs
from fwk.types.sampling import MAX_LOGPROBS

EarlyStopping = Literal[True, False, "never"]


@dataclass(slots=True)
class Beam:
    """A text on its way, or one that is done."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    total: float = 0.0  # sum of the tokens' log-probabilities
    score: float = 0.0  # of one that is done
    is_cut: bool = False  # done because it is as long as it may be


class BeamSearch:
    """The search for one prompt. Ask for ``running``, give ``update`` their next tokens' scores, until ``is_done``.

    end_token_ids: tokens that end a text; none for texts of ``max_tokens`` tokens all.
    early_stopping: True: stop with ``width`` texts done; False: when no text of today's length could be better than the
    worst of them; "never": when none of any length could.
    Raises ``InvalidRequest`` for a ``width`` whose candidates the engine cannot score.
    """

    def __init__(
        self,
        width: int,
        end_token_ids: Sequence[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.width = width
        self._ends = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self.num_candidates = max(2, 1 + len(self._ends)) * width
        if self.num_candidates > MAX_LOGPROBS:
            most = MAX_LOGPROBS // max(2, 1 + len(self._ends))
            raise InvalidRequest(f"beam search takes at most {most} beams with this model, not {width}", "best_of")
        self.running = [Beam()]
        self.is_done = False
        self._done: list[Beam] = []

    def update(self, scores: Sequence[TokenLogprobs]) -> None:
        """Take a step: for each running beam, its next token's best ``num_candidates`` in ``top``, best first."""
        found = [
            (beam.total + logprob, number, token_id)
            for number, (beam, entry) in enumerate(zip(self.running, scores, strict=True))
            for token_id, logprob in entry.top[: self.num_candidates]
        ]
        found.sort(key=lambda candidate: -candidate[0])
        running: list[Beam] = []
        for rank, (total, number, token_id) in enumerate(found[: self.num_candidates]):
            parent = self.running[number]
            is_end, is_cut = token_id in self._ends, len(parent.token_ids) + 1 >= self._max_tokens
            if not (is_end or is_cut):
                if len(running) < self.width:
                    running.append(_extended(parent, scores[number], token_id, total))
            elif rank < self.width:
                self._finish(_extended(parent, scores[number], token_id, total), is_cut and not is_end)
        self.running = running
        self.is_done = not running or self._is_settled()

    def best(self, count: int) -> list[Beam]:
        """The best that are done, best first."""
        return self._done[:count]

    def _finish(self, beam: Beam, is_cut: bool) -> None:
        if self._early_stopping is True and len(self._done) == self.width:
            return
        beam.is_cut = is_cut
        beam.score = beam.total / len(beam.token_ids) ** self._length_penalty
        self._done.append(beam)
        self._done.sort(key=lambda done: -done.score)
        del self._done[self.width :]

    def _is_settled(self) -> bool:
        if len(self._done) < self.width:
            return False
        if self._early_stopping is True:
            return True
        length = len(self.running[0].token_ids)
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self.running[0].total / length**self._length_penalty <= self._done[-1].score


def _extended(parent: Beam, scores: TokenLogprobs, token_id: int, total: float) -> Beam:
    rank = next(rank for rank, (candidate, _) in enumerate(scores.top, 1) if candidate == token_id)
    entry = TokenLogprobs(token_id, total - parent.total, rank, scores.top)
    return Beam([*parent.token_ids, token_id], [*parent.logprobs, entry], total)
