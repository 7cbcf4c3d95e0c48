"""The engines of a served model, whatever pool they are in: its requests' time, and what all of them are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fwk.config import Config
from fwk.errors import EngineDead, InvalidRequest
from fwk.interfaces.engine_pool import Engine, EnginePool, Receiver
from fwk.interfaces.feature import Exclusive
from fwk.server.deadlines import Deadlines
from fwk.types import Request

FeatureCall = Callable[[str, str, Sequence[Any]], Awaitable[Any]]
"""Runs an operation of a feature's part in one engine: the feature, the operation and its arguments."""


class ModelEngines:
    """A pool of engines as the model's frontend uses it.

    make_pool: makes the pool, given what tells an engine that starts later what those before it were told.
    """

    def __init__(self, config: Config, make_pool: Callable[[Callable[[Engine], Awaitable[None]]], EnginePool]) -> None:
        self._config = config
        self._open: dict[str, Deadlines] = {}
        self._changing = asyncio.Lock()
        self._undisturbed = asyncio.Event()  # by a change of all engines; another one with each
        self._undisturbed.set()
        self._lets_in = asyncio.Event()
        self._lets_in.set()
        self._num_users = self._num_waiting = 0
        self.on_begin: Callable[[FeatureCall], Awaitable[None]] | None = None
        """Awaited for each engine that has started in another's place, before it serves."""
        self.given_up = asyncio.Event()
        self.pool = make_pool(self._begin)
        self.pool.on_given_up = self.given_up.set

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Send a request to an engine, inside ``use``; as ``EnginePool.submit``."""
        deadlines = Deadlines(self._config.server)
        try:
            self.pool.submit(request, deadlines.start(receiver))
        except BaseException:
            deadlines.stop()
            raise
        self._open[request.request_id] = deadlines

    def forget(self, request_id: str) -> None:
        """The request has ended; events still on their way are dropped."""
        if request_id in self._open:
            self._open.pop(request_id).stop()
            self.pool.forget(request_id)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        """The engines run, and nothing has them to itself. Raises ``EngineDead`` when they cannot be started."""
        self._num_waiting += 1
        try:
            while not self._lets_in.is_set():
                await self._lets_in.wait()
        finally:
            self._num_waiting -= 1
        self._num_users += 1
        try:
            async with self.pool.use():
                yield
        finally:
            self._num_users -= 1

    @asynccontextmanager
    async def exclusive(self, feature: str) -> AsyncIterator[Exclusive]:
        """The engines for one change of all of them or none, by a feature: as ``ServerPartContext.exclusive``."""
        async with self._changing, self.pool.use():
            engines = list(self.pool.engines)

            async def ask(operation: str, *args: Any) -> list[Any]:
                return await self._in_each(lambda engine: engine.call_feature(feature, operation, args))

            async def drain(*, aborts: bool = False) -> None:
                self._lets_in.clear()
                aborted: set[str] = set()
                while self._num_users or self._open:
                    for request_id in self._open.keys() - aborted if aborts else ():
                        aborted.add(request_id)
                        self.pool.abort(request_id)
                    await asyncio.sleep(0.01)
                self._undisturbed = asyncio.Event()
                if engines != list(self.pool.engines):
                    raise EngineDead("an engine has ended or started meanwhile: nothing was changed")

            try:
                yield Exclusive(ask, drain, lambda: self._num_waiting)
            finally:
                self._lets_in.set()
                self._undisturbed.set()

    async def call_workers(self, name: str, *arguments: Any) -> list[list[Any]]:
        """Run an operation on the workers of every engine that lives; the answers by engine, then by rank.

        Raises ``InvalidRequest`` with the first refusal: other engines may have done it.
        """
        async with self.use():
            return await self._in_each(lambda engine: engine.call_workers(name, arguments))

    async def call_feature(self, feature: str, operation: str, *arguments: Any) -> list[Any]:
        """Run an operation of a feature's part in every engine that lives; the answers by engine.

        Raises ``InvalidRequest`` with the first refusal: other engines may have done it.
        """
        async with self.use():
            return await self._in_each(lambda engine: engine.call_feature(feature, operation, arguments))

    async def _in_each(self, call: Callable[[Engine], Awaitable[Any]]) -> list[Any]:
        results = await asyncio.gather(*map(call, self.pool.engines), return_exceptions=True)
        wrong = [result for result in results if isinstance(result, BaseException)]
        refusal = next((error for error in wrong if isinstance(error, InvalidRequest)), None)
        if refusal is not None or len(wrong) == len(results):
            raise refusal or (wrong[0] if wrong else self._none_lives())
        return [result for result in results if not isinstance(result, BaseException)]

    def _none_lives(self) -> EngineDead:
        return EngineDead(self.pool.trouble() or "no engine lives")

    async def _begin(self, engine: Engine) -> None:
        """Give a new engine what features tell it."""
        undisturbed = self._undisturbed
        await undisturbed.wait()
        if self.on_begin is not None:
            await self.on_begin(engine.call_feature)
        if self._undisturbed is not undisturbed:
            raise EngineDead("the other engines were changed while it started")
