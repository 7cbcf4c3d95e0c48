"""Largest ``max_tokens`` first."""

from __future__ import annotations

from fwk.interfaces.schedule import SchedulePolicy, SchedulerView, SequenceView


class LongestOutputFirst(SchedulePolicy):
    """Pre-empted sequences first, then those that may generate most."""

    def rank(self, sequence: SequenceView, view: SchedulerView) -> tuple[bool, int]:
        return sequence.num_preemptions == 0, -sequence.max_tokens
