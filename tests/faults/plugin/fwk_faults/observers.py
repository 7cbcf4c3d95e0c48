"""Observers: one that shows the engine's books and the application's routes, and four that raise."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord
from fwk.text import ModelText, SequenceText
from fwk.types import EngineStats, SamplingParams, TokenEvent
from fwk_faults import Fault, asked

if TYPE_CHECKING:
    from fastapi import FastAPI


TICK = 0.02
"""Seconds between two looks at the clock of the event loop."""


def _queued_seconds() -> float:
    """How long this thread has waited for a core, ready to run; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class Stats(Observer):
    """All of ``EngineStats`` at /faults/stats, all routes at /faults/routes, the API process at /faults/process."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self._stats = EngineStats()
        self._late: list[float] = []
        self._busy: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._start_clock()

    def _start_clock(self) -> None:
        self._computed, self._queued = time.process_time(), _queued_seconds()
        self._due = self._loop.time() + TICK
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late = self._loop.time() - self._due
        self._late.append(late)
        had_core = TICK + late - (_queued_seconds() - self._queued)
        self._busy.append(max(0.0, min(time.process_time() - self._computed, had_core)))
        self._start_clock()

    def _process(self) -> dict[str, float]:
        """The event loop since somebody asked last, and the memory that is really in use, in bytes.

        late: the most it was behind. busy, busy_p99: the most that this process computed between two of its turns, and
        what 99 of 100 times stayed within: its own work, and that of threads that keep the interpreter from it. Other
        processes that want the same core have no part in these, nor has the time in which the loop waits for a core
        while threads compute on another one.
        """
        late, busy = max(self._late, default=0.0), sorted(self._busy) or [0.0]
        self._late, self._busy = [], []
        self._timer.cancel()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._start_clock()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE")
        return {"late": late, "busy": busy[-1], "busy_p99": busy[int(0.99 * (len(busy) - 1))], "memory": memory}

    def step_finished(self, stats: EngineStats) -> None:
        self._stats = stats

    def routes(self, app: FastAPI) -> None:
        async def stats() -> dict[str, Any]:
            await self.context.settle()
            return msgspec.structs.asdict(self._stats)

        async def routes(scope: Request) -> list[Any]:
            every = scope.app.routes  # ``app`` holds only the routes of this plugin
            return [[sorted(getattr(route, "methods", None) or ()), getattr(route, "path", None)] for route in every]

        async def process() -> dict[str, float]:
            return self._process()

        app.add_api_route("/faults/process", process, methods=["GET"], include_in_schema=False)
        app.add_api_route("/faults/stats", stats, methods=["GET"], include_in_schema=False)
        app.add_api_route("/faults/routes", routes, methods=["GET"], include_in_schema=False)


def _raise_for(record: RequestRecord, call: str) -> None:
    if record.label == f"observer:{call}":
        raise Fault


class FaultyArrived(Observer):
    def request_arrived(self, record: RequestRecord) -> None:
        _raise_for(record, "arrived")


class FaultyTokens(Observer):
    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        if record.num_output_tokens >= 3:
            _raise_for(record, "tokens")


class FaultyFinished(Observer):
    def request_finished(self, record: RequestRecord) -> None:
        _raise_for(record, "finished")


class FaultyDetokenizer(Observer):
    """Observes nothing. The detokeniser is no plugin: requests that ask for it get one that raises at a token."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        follow = ModelText.follow

        def faulty(text: ModelText, sampling: SamplingParams) -> SequenceText:
            sequence = follow(text, sampling)
            fault = asked(sampling.extra, "detokenizer")
            if fault is not None:
                _raise_at(sequence, fault[1])
            return sequence

        ModelText.follow = faulty


def _raise_at(sequence: SequenceText, turn: int) -> None:
    feed = sequence.feed

    def faulty(event: TokenEvent) -> tuple[str, int]:
        if sequence.num_tokens + len(event.token_ids) >= turn:
            raise Fault
        return feed(event)

    sequence.feed = faulty


class FaultyStep(Observer):
    """Raises at the step after a request with its label."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self._is_armed = False

    def request_arrived(self, record: RequestRecord) -> None:
        self._is_armed = record.label == "observer:step"

    def step_finished(self, stats: EngineStats) -> None:
        if self._is_armed:
            raise Fault
