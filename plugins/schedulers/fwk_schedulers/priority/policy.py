"""By priority, then by arrival."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk_schedulers.priority import PriorityOptions


class StrictPriority(SchedulePolicy):
    """The most urgent first. A waiting one pre-empts the least urgent, the last to have arrived of several."""

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        options: PriorityOptions = context.options or PriorityOptions()
        self._sign = 1 if options.schedule_low_priority_values_first else -1
        self._threshold = options.priority_scheduling_preemption_threshold

    def rank(self, sequence: SequenceView, view: SchedulerView) -> int:
        return self._sign * sequence.request.priority

    def choose_preemption_victim(
        self, sequence: SequenceView, running: Sequence[SequenceView], view: SchedulerView
    ) -> SequenceView | None:
        victim = running[-1]
        return victim if self.rank(victim, view) - self.rank(sequence, view) >= self._threshold else None
