"""The order of the queue."""

from __future__ import annotations

from fwk.interfaces.schedule import SchedulePolicy, SchedulerView, SequenceView


class AgingPolicy(SchedulePolicy):
    """Pre-empted sequences come first; the others by what is left of their length after aging.

    All age at the same rate, so who is ahead of whom never changes: one number at arrival says it all.
    """

    def rank(self, sequence: SequenceView, view: SchedulerView) -> tuple[bool, float]:
        rate = self.context.options.aging_rate
        return sequence.num_preemptions == 0, sequence.num_tokens + rate * sequence.arrival
