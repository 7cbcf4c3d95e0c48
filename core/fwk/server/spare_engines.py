"""Processes that have imported what an engine needs, and wait for one to die: another engine is there sooner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fwk.config import Config
from fwk.server.engine_process import EngineProcess
from fwk_process.memory_limits import available_memory

NEEDED_BYTES = 4 * 2**30
"""Left by all else, where ``--spare-engines`` does not say how many there are; one takes a sixteenth of that."""

PAUSE = 1.0
"""Seconds between two looks whether requests run, whom a start slows down; after ``MAX_PAUSES`` it comes anyway."""

MAX_PAUSES = 60


class SpareEngines:
    """Those of one model's engines, all of which take from them."""

    def __init__(self, config: Config, num_engines: int, *, are_here: bool = True) -> None:
        """are_here: engines are processes of this machine; there are no spare ones of others."""
        self._num_engines = num_engines
        self._wanted = config.server.spare_engines if config.server.health_monitor and are_here else 0
        self._waiting: list[EngineProcess] = []
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> EngineProcess | None:
        """One for an engine that is started; None: there is none."""
        while self._waiting:
            process = self._waiting.pop()
            if not process.has_ended:
                return process
            process.discard()
        return None

    def prepare(self, is_busy: Callable[[], bool], num_pauses: int = 0) -> None:
        """Start what is missing, in a pause. ``num_pauses``: looks so far that found none."""
        if self._timer is None and len(self._waiting) < (1 if self._wanted is None else self._wanted):
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._look, is_busy, num_pauses)

    def _look(self, is_busy: Callable[[], bool], num_pauses: int) -> None:
        self._timer = None
        if is_busy() and num_pauses < MAX_PAUSES:
            self.prepare(is_busy, num_pauses + 1)
        elif self._wanted is not None or available_memory() >= NEEDED_BYTES:
            self._waiting.append(EngineProcess(self._num_engines))
            self.prepare(is_busy)

    def close(self) -> None:
        """End them."""
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting:
            self._waiting.pop().discard()
