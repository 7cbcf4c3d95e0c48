"""How many of a model's engines run: more while requests queue, fewer once one less would do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger(__name__)


class Scalable(Protocol):
    """An engine that can be started and stopped."""

    @property
    def num_open(self) -> int:
        """Sequences of its requests that have not ended."""
        ...

    @property
    def is_on(self) -> bool:
        """Whether it takes requests, or is being started."""
        ...

    async def turn_on(self) -> None: ...

    def turn_off(self) -> None:
        """Take no more requests, and stop when those under way have ended."""
        ...


class Scaler:
    """Decides for the engines of one model, told of each request's begin and end.

    One engine is started at a time, after the load was above the target for ``up`` seconds on end; one is told to end
    after it was at or below what one fewer could carry for ``down`` seconds on end.
    """

    def __init__(self, smallest: int, target: int, up: float, down: float) -> None:
        self._smallest, self._target, self._up, self._down = smallest, target, up, down
        self.engines: list[Scalable] = []
        self._timer: asyncio.TimerHandle | None = None
        self._direction = 0
        self._starting: asyncio.Task[None] | None = None

    def note(self) -> None:
        """The number of open requests, or of engines, has changed."""
        direction = self._wanted()
        if direction == self._direction:
            return
        self._direction = direction
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if direction:
            delay = self._up if direction > 0 else self._down
            self._timer = asyncio.get_running_loop().call_later(delay, self._act)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)

    def _wanted(self) -> int:
        """1: one more; -1: one fewer; 0: as many."""
        if self._starting is not None:
            return 0
        num_on = len(self._on())
        load = sum(engine.num_open for engine in self.engines)
        if load > self._target * num_on and num_on < len(self.engines):
            return 1
        return -1 if num_on > self._smallest and load <= self._target * (num_on - 1) else 0

    def _on(self) -> Sequence[Scalable]:
        return [engine for engine in self.engines if engine.is_on]

    def _act(self) -> None:
        direction, self._timer, self._direction = self._direction, None, 0
        if direction > 0:
            engine = next(engine for engine in self.engines if not engine.is_on)
            self._starting = asyncio.get_running_loop().create_task(self._start(engine))
        else:
            self._on()[-1].turn_off()
            log.info("one engine fewer is enough: %d of %d run", len(self._on()), len(self.engines))
        self.note()

    async def _start(self, engine: Scalable) -> None:
        try:
            await engine.turn_on()
            log.info("more engines are needed: %d of %d run", len(self._on()), len(self.engines))
        finally:
            self._starting = None
            self.note()
