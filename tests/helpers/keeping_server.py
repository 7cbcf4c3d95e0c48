"""A dialect that keeps what clients left in a folder, started, ended and killed as a server does it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI

from fwk.interfaces.dialect import Dialect, DialectContext, Frontend
from fwk.server.app import install_error_handlers
from fwk.server.lifecycle import LifecycleManager


class KeepingServer:
    """One life of a server with that dialect."""

    def __init__(self, dialect: type[Dialect], frontend: Frontend, options: Any) -> None:
        self.lifecycles = LifecycleManager()
        self._lifecycle = self.lifecycles.make("dialects.test")
        self.dialect: Any = dialect(DialectContext(frontend, options, self._lifecycle))
        app = FastAPI()
        install_error_handlers(app)
        self.dialect.routes(app)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def begin(self) -> None:
        """It listens; no engine serves yet."""
        await self.lifecycles.begin(self._lifecycle)

    async def start(self) -> httpx.AsyncClient:
        """Its client, once the server has taken over what there is, unless another one has it."""
        await self.begin()
        await self.lifecycles.ready()
        await asyncio.sleep(0.05)
        return self.http

    async def die(self) -> None:
        """As by SIGKILL: nothing is written any more, and the folder is free."""
        records = self.dialect._records
        records._writer.shutdown()
        records._writer = None
        records.close()
        self.dialect._is_closing = True
        running = list(getattr(self.dialect, "_background", {}).values())
        if hasattr(self.dialect, "_batches"):
            self.dialect._batches._is_closing = True
            running += self.dialect._batches._batches.values()
        tasks = [job.task for job in running if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
