"""Processes that have imported what an engine needs, and wait for one to die: another engine is there sooner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fwk.config import Config
from fwk.process.memory_limits import available_memory
from fwk.server.engine_process import EngineProcess

NEEDED_BYTES = 4 * 2**30
"""Left by all else, where ``--spare-engines`` does not say how many there are; one takes a sixteenth of that."""

PAUSE = 1.0
"""Seconds between two looks whether requests run, whom a start slows down; after ``MAX_PAUSES`` it comes anyway."""

MAX_PAUSES = 60


class SpareEngines:
    """Those of one model's engines, all of which take from them."""

    def __init__(self, config: Config, num_engines: int) -> None:
        self._num_engines = num_engines
        self._wanted = config.server.spare_engines if config.server.health_monitor else 0
        self._waiting: list[EngineProcess] = []
        self._task: asyncio.Task[None] | None = None

    def take(self) -> EngineProcess | None:
        """One for an engine that is started; None: there is none."""
        while self._waiting:
            process = self._waiting.pop()
            if not process.has_ended:
                return process
            process.discard()
        return None

    def prepare(self, is_busy: Callable[[], bool]) -> None:
        """Start what is missing, in a pause."""
        if self._wanted != 0 and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._fill(is_busy))

    async def _fill(self, is_busy: Callable[[], bool]) -> None:
        wanted = 1 if self._wanted is None else self._wanted
        while len(self._waiting) < wanted:
            for _ in range(MAX_PAUSES):
                await asyncio.sleep(PAUSE)
                if not is_busy():
                    break
            if self._wanted is None and available_memory() < NEEDED_BYTES:
                return
            self._waiting.append(EngineProcess(self._num_engines))

    def close(self) -> None:
        """End them."""
        if self._task is not None:
            self._task.cancel()
        while self._waiting:
            self._waiting.pop().discard()
