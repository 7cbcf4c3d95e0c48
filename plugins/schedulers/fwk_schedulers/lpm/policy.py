"""Longest cached prefix first, with a bound on how often a sequence is overtaken."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk_schedulers.lpm import LpmOptions

_REFRESHED_PER_PASS = 8
"""Prefix lengths looked up again in one pass. Looking up all of a window can cost more than the step itself; a length
some passes old costs no more than a less perfect order."""


@dataclass(slots=True)
class _Waiting:
    """What is known of a sequence in the window."""

    prefix_len: int  # cached tokens, as of some passes ago
    num_overtakes: int = 0  # sequences from behind it that left the window before it


class LongestPrefixMatch(SchedulePolicy):
    """Orders a window at the head of the queue: pre-empted sequences first, then those that were overtaken
    ``lpm_max_overtakes`` times (both by arrival), then by cached prefix, longest first (ties by arrival).

    No starvation: a sequence with ``k`` before it in the queue is started after at most ``k + lpm_max_overtakes``
    others, plus as many as one step starts, whatever arrives meanwhile.
    """

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        options: LpmOptions = context.options or LpmOptions()
        self._window = options.lpm_window
        self._max_overtakes = options.lpm_max_overtakes
        self._known: dict[tuple[str, int], _Waiting] = {}  # of the last pass's window, in its order
        self._refresh_at = 0

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterable[SequenceView]:
        window = list(islice(waiting, self._window))
        by_rank = [(self._rank(s, known), s) for s, known in zip(window, self._update(window, view), strict=True)]
        by_rank.sort(key=lambda pair: pair[0])  # stable: arrival order among equals
        for _, sequence in by_rank:
            yield sequence
        yield from islice(waiting, len(window), None)

    def _rank(self, sequence: SequenceView, known: _Waiting) -> tuple[int, int]:
        if sequence.num_preemptions > 0:
            return 0, 0
        if known.num_overtakes >= self._max_overtakes:
            return 1, 0
        return 2, -known.prefix_len

    def _update(self, window: list[SequenceView], view: SchedulerView) -> list[_Waiting]:
        """Count who was overtaken since the last pass, and look some prefix lengths up."""
        keys = [(sequence.request.request_id, sequence.index) for sequence in window]
        present = set(keys)
        # One that pre-empted sequences pushed out of the window counts as gone too: that only ages others sooner.
        num_gone = 0
        for key, known in reversed(self._known.items()):
            if key in present:
                known.num_overtakes += num_gone
            else:
                num_gone += 1
        for i in range(min(_REFRESHED_PER_PASS, len(window))):
            at = (self._refresh_at + i) % len(window)
            if keys[at] in self._known:
                self._known[keys[at]].prefix_len = view.cached_prefix_len(window[at])
        self._refresh_at = (self._refresh_at + _REFRESHED_PER_PASS) % max(len(window), 1)
        self._known = {
            key: self._known.get(key) or _Waiting(view.cached_prefix_len(sequence))
            for key, sequence in zip(keys, window, strict=True)
        }
        return list(self._known.values())
