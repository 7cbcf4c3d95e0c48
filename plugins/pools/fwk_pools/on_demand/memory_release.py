"""Routes by which the administrator takes the engines' memory for something else, and gives it back.

For training between the rounds of reinforcement learning, for example. The names are SGLang's and vLLM's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from fwk.errors import InvalidRequest
from fwk_pools.on_demand.engine_sleep import EngineSleep

PARTS = frozenset({"kv_cache", "weights", "cuda_graph"})


class MemoryOrder(BaseModel):
    """The body of SGLang's two: which parts of the memory; all go together here."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tags: list[str] | None = None
    model: str | None = None  # which one, on a server of several


class MemoryRelease:
    """Ends the engines of a model, and starts them again."""

    def __init__(self, sleep: EngineSleep) -> None:
        self._sleep = sleep

    async def _release(self, tags: list[str] | None) -> None:
        _check(tags)
        await asyncio.shield(asyncio.ensure_future(self._sleep.release()))

    async def _resume(self, tags: list[str] | None) -> None:
        _check(tags)
        await asyncio.shield(asyncio.ensure_future(self._sleep.resume()))

    def routes(self, app: FastAPI) -> None:
        """Add the administrator's routes."""

        @app.post("/release_memory_occupation")
        async def release_memory_occupation(order: MemoryOrder | None = None) -> dict[str, Any]:
            await self._release(order.tags if order is not None else None)
            return {"success": True}

        @app.post("/resume_memory_occupation")
        async def resume_memory_occupation(order: MemoryOrder | None = None) -> dict[str, Any]:
            await self._resume(order.tags if order is not None else None)
            return {"success": True}

        @app.post("/sleep")
        async def sleep(level: int = 1) -> Response:
            if level not in (1, 2):
                raise InvalidRequest(f"level {level}: it is 1 or 2, and both release all of the memory", "level")
            await self._release(None)
            return Response()

        @app.post("/wake_up")
        async def wake_up() -> Response:
            await self._resume(None)
            return Response()

        @app.get("/is_sleeping")
        async def is_sleeping() -> dict[str, bool]:
            return {"is_sleeping": self._sleep.is_released}


def _check(tags: list[str] | None) -> None:
    if tags is not None and not PARTS - {"cuda_graph"} <= set(tags) <= PARTS:
        raise InvalidRequest(
            "tags: the memory is released and resumed as a whole here, with the processes that hold it: leave tags out",
            "tags",
        )
