"""Models whose engines share a bounded memory: to start one, those used least recently are put to sleep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import psutil

from fwk_pools.on_demand.engine_sleep import EngineSleep

log = logging.getLogger(__name__)

ENGINE_BYTES = 512 * 2**20
"""What an engine process takes besides its model's weights, until it has been measured."""

IDLE_CHECK_SECONDS = 0.25


class SleepingModel:
    """A model as the memory's books see it. ``file_bytes``: what its weights take before they have been measured."""

    def __init__(self, name: str, sleep: EngineSleep, pids: Callable[[], Sequence[int]], file_bytes: int) -> None:
        self.name = name
        self.sleep = sleep
        self._pids = pids
        self._measured = 0
        self._expected = file_bytes + ENGINE_BYTES

    @property
    def num_bytes(self) -> int:
        """What its engines take, or would."""
        if not self.sleep.is_asleep:
            self._measured = max(_resident(self._pids()), 1)
        return self._measured or self._expected


class EngineMemory:
    """Puts engines to sleep: those unused for ``idle_timeout`` seconds, and those whose memory another model needs.

    limit: bytes that all engines may take; None for no limit. A model whose turn it is waits until the ones used least
    recently have finished what they do; meanwhile new requests for those wait, so no model waits for ever.
    """

    def __init__(self, models: Sequence[SleepingModel], limit: int | None, idle_timeout: float | None) -> None:
        self._models: list[SleepingModel] = []
        self._limit = limit
        self._idle_timeout = idle_timeout
        self._turns = asyncio.Lock()  # first come, first served
        for model in models:
            self.add(model)

    def add(self, model: SleepingModel) -> None:
        """One more, before any of them starts."""
        self._models.append(model)
        model.sleep.turn = partial(self._turn, model)

    async def watch(self) -> None:
        """Put to sleep what is unused, for ever."""
        while self._idle_timeout is not None:
            await asyncio.sleep(IDLE_CHECK_SECONDS)
            for model in self._models:
                sleep = model.sleep
                if sleep.is_idle and sleep.idle_seconds >= self._idle_timeout and await sleep.fall_asleep():
                    log.info("%s sleeps after %g idle seconds", model.name, self._idle_timeout)

    @asynccontextmanager
    async def _turn(self, model: SleepingModel) -> AsyncIterator[None]:
        """A model's turn to start: there is room for it."""
        async with self._turns:
            while (victim := self._victim(model)) is not None:
                victim.sleep.is_held = True  # its new requests wait until it has slept
                if victim.sleep.is_idle and await victim.sleep.fall_asleep():
                    log.info("%s sleeps: %s needs its memory", victim.name, model.name)
                else:
                    await asyncio.sleep(0.01)
            yield

    def _victim(self, model: SleepingModel) -> SleepingModel | None:
        """The model to stop before this one starts; None when it fits, or is alone."""
        if self._limit is None or not model.sleep.is_asleep:
            return None
        others = [other for other in self._models if other is not model and not other.sleep.is_asleep]
        if sum(other.num_bytes for other in [model, *others]) <= self._limit:
            return None
        return max(others, key=lambda o: (o.sleep.is_idle, o.sleep.is_held, o.sleep.idle_seconds), default=None)


def _resident(pids: Sequence[int]) -> int:
    """Resident bytes of processes and their children."""
    total = 0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in [process, *process.children(recursive=True)]:
                total += one.memory_info().rss
        except psutil.Error:
            continue
    return total
