"""The pool of a server that has no engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fwk.errors import EngineDead
from fwk.interfaces.engine_pool import Engine, EnginePool, EnginePoolContext, Receiver
from fwk.types import EngineReady, EngineStats, Request

WHY = "this server encodes media for others (--encoder-only) and generates nothing: ask the servers that it encodes for"
ANY = 2**31 - 1
MAX_OPEN = 256
"""Orders of other servers at once."""


class NoEngines(EnginePool):
    """Always ready, and nothing can be submitted."""

    def __init__(self, context: EnginePoolContext) -> None:
        super().__init__(context, 0)

    async def start(self) -> None:
        pass

    async def wait_ready(self) -> EngineReady:
        return EngineReady(
            fingerprint="", num_blocks=0, block_size=1, max_model_len=ANY, vocab_size=ANY, chosen={}, reasons=[]
        )

    async def stop(self) -> None:
        pass

    async def start_again(self) -> EngineReady:
        return await self.wait_ready()

    async def close(self) -> None:
        pass

    @property
    def max_open(self) -> int:
        return MAX_OPEN

    @property
    def has_started(self) -> bool:
        return True

    @property
    def is_loaded(self) -> bool:
        return True

    def trouble(self) -> str | None:
        return None

    def degraded(self) -> str | None:
        return None

    @asynccontextmanager
    async def use(self) -> AsyncGenerator[None, None]:
        raise EngineDead(WHY)
        yield

    def submit(self, request: Request, receiver: Receiver) -> None:
        raise EngineDead(WHY)

    def abort(self, request_id: str, index: int | None = None) -> None:
        pass

    def pause(self, request_id: str, is_on: bool) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    @property
    def engines(self) -> Sequence[Engine]:
        return ()

    @property
    def stats(self) -> EngineStats:
        return EngineStats()

    def info(self) -> list[dict[str, Any]]:
        return []

    def summary(self) -> dict[str, Any]:
        return {}
