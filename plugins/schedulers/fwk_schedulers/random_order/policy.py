"""A shuffle that does only as much as is read of it."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk_schedulers.random_order import RandomOptions


class RandomOrder(SchedulePolicy):
    """Keeps the waiting sequences in a list of its own, in any order, to pick by place (Fisher and Yates)."""

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        options: RandomOptions = context.options or RandomOptions()
        self._random = random.Random(options.random_order_seed)
        self._waiting: list[SequenceView] = []
        self._places: dict[SequenceView, int] = {}

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterator[SequenceView]:
        for num_left in range(len(self._waiting), 0, -1):
            yield self._move_to(num_left - 1, self._random.randrange(num_left))

    def on_waiting(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._places[sequence] = len(self._waiting)
        self._waiting.append(sequence)

    def on_started(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._move_to(len(self._waiting) - 1, self._places[sequence])
        self._waiting.pop()
        del self._places[sequence]

    def on_finished(self, sequence: SequenceView, view: SchedulerView) -> None:
        if sequence in self._places:
            self.on_started(sequence, view)

    def _move_to(self, there: int, here: int) -> SequenceView:
        items = self._waiting
        items[here], items[there] = items[there], items[here]
        self._places[items[here]], self._places[items[there]] = here, there
        return items[there]
