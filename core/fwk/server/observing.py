"""Calls observers; one that raises is told nothing more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from fwk.errors import story
from fwk.interfaces.observer import Observer, RequestRecord
from fwk.types import EngineStats

log = logging.getLogger(__name__)


class Observers:
    """All observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)

    def request_arrived(self, record: RequestRecord) -> None:
        self._tell(lambda observer: observer.request_arrived(record))

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        for observer in list(self._observers):
            try:
                observer.tokens_received(record, num_tokens, seconds)
            except Exception as error:
                self._drop(observer, error)

    def request_finished(self, record: RequestRecord) -> None:
        self._tell(lambda observer: observer.request_finished(record))

    def step_finished(self, stats: EngineStats) -> None:
        self._tell(lambda observer: observer.step_finished(stats))

    def close(self) -> None:
        self._tell(lambda observer: observer.close())

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in list(self._observers):
            try:
                call(observer)
            except Exception as error:
                self._drop(observer, error)

    def _drop(self, observer: Observer, error: Exception) -> None:
        log.error("observer %s raised and is told nothing more: %s", type(observer).__name__, story(error))
        log.debug("what it raised", exc_info=error)
        self._observers.remove(observer)
