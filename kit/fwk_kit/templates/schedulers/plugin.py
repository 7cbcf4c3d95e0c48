"""Shortest prompt first, but nobody waits for ever."""

from __future__ import annotations

from fwk.interfaces.schedule import SchedulePolicy, SchedulerView, SequenceView


class MinePolicy(SchedulePolicy):
    """Pre-empted sequences come first; the others by their length, and every second of arriving earlier counts."""

    def rank(self, sequence: SequenceView, view: SchedulerView) -> tuple[bool, float]:
        rate = self.context.options.mine_rate
        return sequence.num_preemptions == 0, sequence.num_tokens + rate * sequence.arrival
