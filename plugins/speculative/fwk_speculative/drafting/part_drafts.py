"""Drafts of what features know to come next, which is verified in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fwk.interfaces.feature import WorkerPart
from fwk.interfaces.step import SequenceRecords
from fwk.types import ScheduledSequence, SequenceResult

Parents = Callable[[int], list[int] | None]
"""Of a slot: which of its newest drafts each of them follows; None for a chain."""


MAX_DRAFTS = 32
"""Most drafts of one sequence."""


class NoPartDrafts:
    """Nothing is known to come."""

    @property
    def is_any(self) -> bool:
        """Whether drafts may be entered for any slot at all."""
        return False

    def enter(
        self, sampled: Iterable[ScheduledSequence], results: dict[int, SequenceResult], parents: Parents
    ) -> list[int]:
        """Put drafts into a step's results, once the decoder has put in its own; returns the slots that got some."""
        return []


class PartDrafts(NoPartDrafts):
    """Enters what features' parts say (``WorkerPart.next_tokens``).

    It takes the place of a decoder's drafts that begin otherwise.
    """

    def __init__(self, next_parts: Mapping[int, Sequence[WorkerPart]], table: SequenceRecords, num_slots: int) -> None:
        """next_parts: as in ``DraftTarget``. num_slots: the first slots, whose sequences are drafted for."""
        self._next_parts = next_parts
        self._table = table
        self._num_slots = num_slots

    def enter(
        self, sampled: Iterable[ScheduledSequence], results: dict[int, SequenceResult], parents: Parents
    ) -> list[int]:
        replaced: list[int] = []
        longest = self._table.token_ids.shape[1] - 1
        for scheduled in sampled:
            slot = scheduled.slot
            tokens = self._next_tokens(slot) if slot < self._num_slots else []
            if not tokens or self._table.is_undone(scheduled, results[slot].token_ids):
                continue
            num_coming = int(self._table.unknown[slot])  # tokens that a launched step chooses
            tokens = tokens[: longest - int(self._table.num_tokens[slot]) + num_coming]
            if len(tokens) <= num_coming:  # that step's result is not worth waiting for
                continue
            drafts = results[slot].draft_token_ids
            if not _holds(drafts, parents(slot), tokens):
                results[slot].draft_token_ids = list(tokens)
                replaced.append(slot)
        return replaced

    @property
    def is_any(self) -> bool:
        return bool(self._next_parts)

    def _next_tokens(self, slot: int) -> Sequence[int]:
        """Of the first part that says something."""
        told = (part.next_tokens(slot) for part in self._next_parts.get(slot, ()))
        return next((tokens[:MAX_DRAFTS] for tokens in told if tokens), ())


def _holds(drafts: Sequence[int], parents: Sequence[int] | None, path: Sequence[int]) -> bool:
    """Whether drafts say ``path`` from their root on."""
    if parents is None:
        return list(drafts[: len(path)]) == list(path)
    at = -1
    for token in path:
        found = (i for i in range(at + 1, len(drafts)) if parents[i] == at and drafts[i] == token)
        following = next(found, None)
        if following is None:
            return False
        at = following
    return True
