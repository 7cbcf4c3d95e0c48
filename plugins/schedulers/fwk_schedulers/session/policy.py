"""Sessions served last come first."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fwk.interfaces.ranked_list import Groups
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk_schedulers.session import SessionOptions


class SessionAffinity(SchedulePolicy):
    """First whoever was pre-empted or has waited too long, then the recent sessions, then the others by arrival."""

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        options: SessionOptions = context.options or SessionOptions()
        self._window, self._max_wait = options.session_window, options.session_max_wait
        self._recent: dict[tuple[str, str], None] = {}  # the latest last
        self._waiting: Groups[tuple[str, str], SequenceView] = Groups()

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterator[SequenceView]:
        for sequence in waiting:
            if not sequence.num_preemptions and view.now - sequence.arrival < self._max_wait:
                break
            yield sequence
        for session in reversed(self._recent):
            yield from self._waiting.get(session)
        yield from waiting

    def on_waiting(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._waiting.add(_session(sequence), sequence, sequence.arrival, 0)

    def on_started(self, sequence: SequenceView, view: SchedulerView) -> None:
        self.on_finished(sequence, view)
        session = _session(sequence)
        self._recent.pop(session, None)
        if session[1]:
            self._recent[session] = None
        if len(self._recent) > self._window:
            del self._recent[next(iter(self._recent))]

    def on_finished(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._waiting.discard(_session(sequence), sequence)


def _session(sequence: SequenceView) -> tuple[str, str]:
    return sequence.request.service.tenant, sequence.request.service.session
