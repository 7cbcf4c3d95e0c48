"""The lowest pool: one engine process, and another in its place when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import msgspec

from fwk.config import Config
from fwk.errors import EngineDead, InvalidRequest, NotServed
from fwk.interfaces.engine_pool import Engine, EnginePool, Receiver
from fwk.server.engine_client import EngineClient
from fwk.server.engine_process import EngineProcess
from fwk.types import EngineReady, EngineStats, Request, total_stats
from fwk_http.admission import RETRY_SECONDS

log = logging.getLogger(__name__)

FIRST_DELAY = 0.5
"""Seconds until an engine is started again; twice as many with each death."""

MAX_DEATHS = 5
DEATHS_SECONDS = 60


class OneEngine(EnginePool):
    """One engine of ``num_engines`` that a model has, in a process by ``new_process``.

    begins: tells an engine in another's place what that one was told, before it serves.
    """

    def __init__(
        self,
        config: Config,
        fingerprint: str,
        begins: Callable[[Engine], Awaitable[None]],
        index: int,
        num_engines: int,
        new_process: Callable[[], EngineProcess],
    ) -> None:
        self._config = config
        self._begins = begins
        self._index = index
        self._new_client = partial(EngineClient, config, fingerprint, index, num_engines, new_process)
        self._past: EngineStats | None = None  # what engines had done that have ended since
        self._now = EngineStats()
        self._deaths: list[float] = []
        self._weights: str | None = None  # the identity of those of the first start
        self._open: dict[str, int] = {}  # sequences, by request
        self._reviving: asyncio.Task[None] | None = None
        self._install(self._new_client())

    def _install(self, client: EngineClient) -> None:
        self._client = client
        client.on_stats = self._note
        client.on_death = self._revive

    async def start(self) -> None:
        await self._client.start()

    async def wait_ready(self) -> EngineReady:
        ready = await self._client.wait_ready()
        self._check_weights(ready)
        return ready

    def _check_weights(self, ready: EngineReady) -> None:
        """Raise ``EngineDead`` for an engine that has begun with other weights than the one before it."""
        if self._weights is None:
            self._weights = ready.weights_identity
        if ready.weights_identity != self._weights:
            raise EngineDead(
                "the weights that an engine has read are others than those that this server began with, for their "
                "source has changed: start the server again to serve the new ones"
            )

    async def stop(self) -> None:
        await self._stop_reviving()
        await self._client.close()
        self._count_anew(EngineStats())

    async def start_again(self) -> EngineReady:
        self._install(self._new_client())
        try:
            await self.start()
            ready = await self.wait_ready()
            await self._begins(self._client)
        except BaseException:
            await self._client.close()
            raise
        return ready

    async def close(self) -> None:
        await self._stop_reviving()
        await self._client.close()

    async def _stop_reviving(self) -> None:
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)

    @property
    def max_open(self) -> int:
        return self._config.engine.max_running_requests + self._config.server.max_queued_requests

    @property
    def has_started(self) -> bool:
        return self._client.has_started

    @property
    def is_loaded(self) -> bool:
        return True

    def trouble(self) -> str | None:
        return self._client.trouble()

    def degraded(self) -> str | None:
        return None

    def use(self) -> nullcontext[None]:
        return nullcontext()

    @property
    def num_open(self) -> int:
        """Sequences whose requests have not ended."""
        return sum(self._open.values())

    def submit(self, request: Request, receiver: Receiver) -> None:
        trouble = self.trouble()
        if trouble is not None:
            raise EngineDead(trouble)
        if self._open and self.num_open + request.n > self.max_open:
            waiting = self._config.server.max_queued_requests
            raise NotServed(f"{waiting} requests are waiting already; try again", 429, RETRY_SECONDS)
        self._client.submit(request, receiver)
        self._open[request.request_id] = request.n

    def abort(self, request_id: str, index: int | None = None) -> None:
        if request_id in self._open:
            self._client.abort(request_id, index)

    def pause(self, request_id: str, is_on: bool) -> None:
        if request_id in self._open:
            self._client.pause(request_id, is_on)

    def forget(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None:
            self._client.forget(request_id)

    @property
    def engines(self) -> Sequence[Engine]:
        return [] if self._client.is_dead else [self._client]

    @property
    def stats(self) -> EngineStats:
        now = self._now.without_gauges() if self._client.is_dead else self._now
        return now if self._past is None else total_stats([now, self._past])

    def info(self) -> list[dict[str, Any]]:
        stats = msgspec.structs.asdict(self._now)
        return [{"trouble": self.trouble(), "num_open": self.num_open, "stats": stats}]

    def summary(self) -> dict[str, Any]:
        return {}

    def _note(self, stats: EngineStats) -> None:
        self._now = stats
        self.on_stats(self.stats)

    def _count_anew(self, stats: EngineStats) -> None:
        """From now on an engine's numbers are these; what the one before it had done stays counted."""
        ended = self._now.without_gauges()
        self._past = ended if self._past is None else total_stats([self._past, ended])
        self._note(stats)

    def _revive(self) -> str:
        """The engine has died: start another in its place, if we are to. Returns what is done, for the log."""
        self.on_death(self._client.trouble() or "")
        if not self._config.server.health_monitor:
            return "it is not started again (--health-monitor is off)"
        delay = self._delay()
        self._reviving = asyncio.create_task(self._restart(delay))
        self._reviving.add_done_callback(self._check_restart)
        return _plan(delay)

    def _check_restart(self, task: asyncio.Task[None]) -> None:
        """A restart that fails in a way that was not foreseen is no reason to wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an engine could not be started again", exc_info=error)
            self.on_given_up()

    def _delay(self) -> float | None:
        """Seconds until an engine that has died now is started again; None when it has died too often."""
        now = time.monotonic()
        self._deaths = [*(death for death in self._deaths if now - death < DEATHS_SECONDS), now]
        return None if len(self._deaths) >= MAX_DEATHS else FIRST_DELAY * 2 ** (len(self._deaths) - 1)

    async def _restart(self, delay: float | None) -> None:
        """Start an engine until one serves, each time after a longer wait; give up after too many deaths."""
        await self._client.close()
        while delay is not None:
            await asyncio.sleep(delay)
            client = self._new_client()
            try:
                await client.start()
                self._check_weights(await client.wait_ready())
                await self._begins(client)
            except (EngineDead, InvalidRequest, OSError) as error:
                await client.close()
                delay = self._delay()
                log.error("engine %d could not be started again: %s; %s", self._index, error, _plan(delay))
                continue
            except asyncio.CancelledError:
                await client.close()
                raise
            self._install(client)
            self._count_anew(client.stats)
            log.warning("engine %d serves again", self._index)
            return
        self.on_given_up()


def _plan(delay: float | None) -> str:
    """What is done about an engine's death."""
    if delay is None:
        return f"it died {MAX_DEATHS} times within {DEATHS_SECONDS} seconds and is not started again"
    return f"it is started again in {delay:g} seconds"
