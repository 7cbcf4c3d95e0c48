"""Fewest tokens first, less what was waited."""

from __future__ import annotations

from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk_schedulers.sjf import SjfOptions


class ShortestJobFirst(SchedulePolicy):
    """A job is its prompt and the most it may generate.

    Ageing by a constant rate needs no clock: whoever came a second earlier is that much shorter, now and later.
    """

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        options: SjfOptions = context.options or SjfOptions()
        self._aging = options.sjf_aging

    def rank(self, sequence: SequenceView, view: SchedulerView) -> float:
        return len(sequence.request.prompt_token_ids) + sequence.max_tokens + self._aging * sequence.arrival
