"""A model's engines, which may sleep: they end while they are not used, and start for the next request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from fwk.errors import ConfigError
from fwk.interfaces.engine_pool import EnginePool, EnginePoolContext, Receiver
from fwk.types import EngineReady, Request
from fwk_pools.on_demand.engine_memory import EngineMemory, SleepingModel
from fwk_pools.on_demand.engine_sleep import RELEASED, EngineSleep
from fwk_pools.on_demand.memory_release import MemoryRelease


class OnDemand(EnginePool):
    """The pool below, while it is used. Of several models the first starts with the server, the others asleep."""

    def __init__(self, context: EnginePoolContext) -> None:
        super().__init__(context)
        options, [below] = context.options, self.below
        self._open: set[str] = set()
        self.sleep = EngineSleep(below.stop, below.start_again, lambda: bool(self._open))
        self.sleep.on_ready = self._woken
        limit = options.models_memory_limit
        if limit is not None and context.model_bytes > limit * 2**30:
            raise ConfigError(
                f"--models-memory-limit {limit:g}: the files of {context.model} alone hold "
                f"{context.model_bytes / 2**30:.1f} GiB"
            )
        self._books = SleepingModel(context.name, self.sleep, self._pids, context.model_bytes)
        memory: EngineMemory | None = context.shared.get("memory")
        if memory is None:
            memory = EngineMemory((), None if limit is None else int(limit * 2**30), options.idle_timeout)
            context.shared["memory"] = memory
            context.lifecycle.background(memory.watch)
        memory.add(self._books)

    def _pids(self) -> list[int]:
        return [engine.pid for engine in self.engines if engine.pid is not None]

    async def _woken(self, ready: EngineReady) -> None:
        if self.on_ready is not None:
            await self.on_ready(ready)

    async def start(self) -> None:
        if self.context.model_index:
            await self.sleep.begin_asleep()
        else:
            await super().start()

    async def wait_ready(self) -> EngineReady:
        ready = await super().wait_ready()
        self.sleep.note_ready()
        return ready

    async def close(self) -> None:
        await self.sleep.close()
        await super().close()

    @property
    def is_loaded(self) -> bool:
        return not self.sleep.is_asleep

    def trouble(self) -> str | None:
        if self.sleep.is_released:
            return RELEASED
        return None if self.sleep.is_asleep else super().trouble()

    def degraded(self) -> str | None:
        return None if self.sleep.is_asleep else super().degraded()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        async with self.sleep.awake(), super().use():
            yield

    def submit(self, request: Request, receiver: Receiver) -> None:
        super().submit(request, receiver)
        self._open.add(request.request_id)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._open.discard(request_id)
        self.sleep.note_use()

    def info(self) -> list[dict[str, Any]]:
        """``asleep``: then nothing is wrong with them."""
        is_asleep = self.sleep.is_asleep
        untroubled = {"trouble": None} if is_asleep else {}
        return [told | untroubled | {"asleep": is_asleep} for told in super().info()]

    def summary(self) -> dict[str, Any]:
        return {"asleep": self.sleep.is_asleep, "num_bytes": self._books.num_bytes}

    def admin_routes(self, app: FastAPI) -> None:
        if self.context.options.enable_memory_saver:
            MemoryRelease(self.sleep).routes(app)
