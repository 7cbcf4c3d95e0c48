"""Arrival order."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fwk.interfaces.schedule import SchedulePolicy, SchedulerView, SequenceView


class FirstComeFirstServed(SchedulePolicy):
    """The waiting queue as it stands."""

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterable[SequenceView]:
        return waiting
