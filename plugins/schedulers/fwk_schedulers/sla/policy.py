"""Earliest deadline first (Liu and Layland, 1973): if any order meets all deadlines of one resource, this one does."""

from __future__ import annotations

from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk_schedulers.sla import SlaOptions, read_tiers


class EarliestDeadlineFirst(SchedulePolicy):
    """The deadline is for the first token. Of running sequences the one with the latest deadline is pre-empted first.

    A request is overtaken only by those that arrive before its deadline, so nobody starves.
    """

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        options: SlaOptions = context.options or SlaOptions()
        self._tiers = read_tiers(options.sla_tiers)
        self._default = options.sla_default

    def rank(self, sequence: SequenceView, view: SchedulerView) -> float:
        service = sequence.request.service
        if service.deadline is not None:
            return sequence.arrival + service.deadline
        return sequence.arrival + self._tiers.get(service.tier, self._default)
