"""One engine in an actor. Which process speaks for it, and starts it anew, is core's (``EnginePoolSpec.process``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from fwk.errors import EngineDead, InvalidRequest
from fwk.interfaces.engine_pool import Engine, EnginePool, EnginePoolContext, Receiver
from fwk.types import EngineReady, Request
from fwk_pools.ray.scaling import Scaler

log = logging.getLogger(__name__)

OFF = "the engine is not started: the others are enough"


class RayEngine(EnginePool):
    """The engine below, which may be off while the other engines of its model are enough.

    Those of one model share a ``Scaler``. At the start the first ``--ray-min-engines`` run; the others have in common
    with them what an engine says when it is ready.
    """

    def __init__(self, context: EnginePoolContext) -> None:
        super().__init__(context)
        options = context.options
        self._open: dict[str, int] = {}
        books: list[RayEngine] = context.shared.setdefault(f"engines {context.model_index}", [])
        self._first = books[0] if books else self
        self._may_be_off = options.ray_min_engines is not None and len(books) >= options.ray_min_engines
        self._is_on = not self._may_be_off
        self._is_running = self._is_on
        self._is_closing = False
        self._stopping: asyncio.Task[None] | None = None
        books.append(self)
        self._scaler: Scaler | None = None
        if options.ray_min_engines is not None:
            delays = options.ray_upscale_delay, options.ray_downscale_delay
            new = Scaler(options.ray_min_engines, options.ray_target_requests, *delays)
            scaler: Scaler = context.shared.setdefault(f"scaler {context.model_index}", new)
            scaler.engines.append(self)
            self._scaler = scaler

    @property
    def num_open(self) -> int:
        """Sequences of requests that have not ended."""
        return sum(self._open.values())

    @property
    def is_on(self) -> bool:
        return self._is_on

    async def turn_on(self) -> None:
        """Start the engine. What goes wrong is logged, and it stays off."""
        if self._stopping is not None:
            await self._stopping
        self._is_on = True
        try:
            await super().start_again()
            self._is_running = True
        except (EngineDead, InvalidRequest, OSError) as error:
            self._is_on = False
            log.error("a further engine could not be started: %s", error)
        except BaseException:
            self._is_on = False
            raise

    def turn_off(self) -> None:
        """No more requests are taken; the engine is stopped once those under way have ended."""
        self._is_on = False
        self._stop_if_unused()

    def _stop_if_unused(self) -> None:
        if not self._is_on and self._is_running and not self._open and not self._is_closing:
            self._is_running = False
            self._stopping = asyncio.get_running_loop().create_task(super().stop())

    async def start(self) -> None:
        if self._is_on:
            await super().start()

    async def wait_ready(self) -> EngineReady:
        return await (super() if self._is_on else super(RayEngine, self._first)).wait_ready()

    async def stop(self) -> None:
        if self._is_running:
            await super().stop()

    async def start_again(self) -> EngineReady:
        return await (super().start_again() if self._is_on else self._first.wait_ready())

    async def close(self) -> None:
        self._is_closing = True
        if self._scaler is not None:
            await self._scaler.close()
        if self._stopping is not None:
            await asyncio.gather(self._stopping, return_exceptions=True)
        await super().close()

    @property
    def has_started(self) -> bool:
        return super().has_started if self._is_on else self._first.has_started

    @property
    def is_loaded(self) -> bool:
        return self._is_on

    def trouble(self) -> str | None:
        return super().trouble() if self._is_on else OFF

    def submit(self, request: Request, receiver: Receiver) -> None:
        if not self._is_on:
            raise EngineDead(OFF)
        super().submit(request, receiver)
        self._open[request.request_id] = request.n
        if self._scaler is not None:
            self._scaler.note()

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        if self._open.pop(request_id, None) is not None:
            self._stop_if_unused()
            if self._scaler is not None:
                self._scaler.note()

    @property
    def engines(self) -> Sequence[Engine]:
        return super().engines if self._is_running else []

    def info(self) -> list[dict[str, Any]]:
        """``is_on``: else nothing is wrong with it."""
        untroubled = {} if self._is_on else {"trouble": None}
        return [told | untroubled | {"is_on": self._is_on} for told in super().info()]
