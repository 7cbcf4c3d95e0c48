"""The engines of a served model, whatever pool they are in: its requests' time, and what all of them are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fwk.config import Config
from fwk.errors import EngineDead, InvalidRequest
from fwk.interfaces.engine_pool import Engine, EnginePool, Receiver
from fwk.server.admission import Deadlines
from fwk.types import Request

log = logging.getLogger(__name__)

FeatureCall = Callable[[str, str, Sequence[Any]], Awaitable[Any]]
"""Runs an operation of a feature's part in one engine: the feature, the operation and its arguments."""

EngineSwitching = tuple[str, str, Mapping[str, object], bool]
"""Family and name of a plugin, its options, and whether it is used from now on or no more."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """A checkpoint that is served in place of that of the start. fingerprint: of its files, when they were read."""

    model: str
    load_format: str
    fingerprint: str


class ModelEngines:
    """A pool of engines as the model's frontend uses it.

    make_pool: makes the pool, given what tells an engine that starts later what those before it were told.
    """

    def __init__(self, config: Config, make_pool: Callable[[Callable[[Engine], Awaitable[None]]], EnginePool]) -> None:
        self._config = config
        self._open: dict[str, Deadlines] = {}
        self._switched: dict[tuple[str, str], EngineSwitching] = {}
        self._weights: NewWeights | None = None  # in place of those of the start
        self._updating = asyncio.Lock()
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
    async def _quiet(self, on_look: Callable[[], None]) -> AsyncIterator[None]:
        """No request uses the engines: open ones have ended, and new ones wait until this is left.

        on_look: called now and then while they end.
        """
        self._lets_in.clear()
        try:
            while self._num_users or self._open:
                on_look()
                await asyncio.sleep(0.01)
            yield
        finally:
            self._lets_in.set()

    async def switch(self, new: EngineSwitching, old: EngineSwitching) -> None:
        """Exchange a plugin in every engine that lives, or in none; engines to come get it before they serve.

        Raises ``InvalidRequest`` when an engine cannot: those that could go back to ``old``.
        """
        async with self.use():
            alive = self.pool.engines
            results = await asyncio.gather(*(engine.switch(*new) for engine in alive), return_exceptions=True)
            wrong = next((result for result in results if isinstance(result, InvalidRequest)), None)
            if wrong is None and any(result is None for result in results):
                self._switched[new[:2] if new[0] == "logits_processors" else (new[0], "")] = new
                return
            changed = [engine for engine, result in zip(alive, results, strict=True) if result is None]
            await asyncio.gather(*(engine.switch(*old) for engine in changed), return_exceptions=True)
            raise wrong or self._none_lives()

    async def call_workers(self, name: str, *arguments: Any) -> list[list[Any]]:
        """Run an operation on the workers of every engine that lives; the answers by engine, then by rank.

        Raises ``InvalidRequest`` with the first refusal: other engines may have done it.
        """
        return await self._in_each(lambda engine: engine.call_workers(name, arguments))

    async def call_feature(self, feature: str, operation: str, *arguments: Any) -> list[Any]:
        """Run an operation of a feature's part in every engine that lives; the answers by engine.

        Raises ``InvalidRequest`` with the first refusal: other engines may have done it.
        """
        return await self._in_each(lambda engine: engine.call_feature(feature, operation, arguments))

    async def _in_each(self, call: Callable[[Engine], Awaitable[Any]]) -> list[Any]:
        async with self.use():
            results = await asyncio.gather(*map(call, self.pool.engines), return_exceptions=True)
        wrong = [result for result in results if isinstance(result, BaseException)]
        refusal = next((error for error in wrong if isinstance(error, InvalidRequest)), None)
        if refusal is not None or len(wrong) == len(results):
            raise refusal or (wrong[0] if wrong else self._none_lives())
        return [result for result in results if not isinstance(result, BaseException)]

    def _none_lives(self) -> EngineDead:
        return EngineDead(self.pool.trouble() or "no engine lives")

    async def exchange_weights(self, model: str, load_format: str | None, *, aborts: bool) -> int:
        """Serve another checkpoint of the same kind in every engine that lives, or in none: as ``ChangeWeights``.

        Engines read it while they serve, each between two of its steps. Then requests under way end, by themselves or
        aborted (``aborts``), and those that come meanwhile wait; returns how many did. Engines to come get it before
        they serve. Raises ``InvalidRequest`` with an engine's words, ``EngineDead``; then nothing has changed.
        """
        load_format = load_format or self._config.model.load_format
        aborted: set[str] = set()

        def abort_open() -> None:
            for request_id in self._open.keys() - aborted:
                aborted.add(request_id)
                self.pool.abort(request_id)

        async with self._updating, self.pool.use():
            engines = self.pool.engines
            found = await self._prepare(engines, model, load_format)
            try:
                async with self._quiet(abort_open if aborts else lambda: None):
                    if list(engines) != list(self.pool.engines):
                        raise EngineDead("an engine has ended or started meanwhile: the weights stay as they are")
                    self._weights = NewWeights(model, load_format, found)  # also of engines that die from here on
                    calls = (engine.change_weights("use") for engine in engines)
                    for result in await asyncio.gather(*calls, return_exceptions=True):
                        if isinstance(result, BaseException):
                            log.error("an engine died when it was given other weights: %s", result)
                    log.info("the weights are those of %s", model)
                    return self._num_waiting
            except BaseException:
                await self._discard(engines)
                raise

    async def _prepare(self, engines: Sequence[Engine], model: str, load_format: str) -> str:
        """Have engines read a checkpoint; its fingerprint. Raises the first refusal, with nothing kept of it."""
        calls = (engine.change_weights("prepare", model, load_format) for engine in engines)
        results = await asyncio.gather(*calls, return_exceptions=True)
        wrong = [result for result in results if isinstance(result, BaseException)]
        found = {result for result in results if isinstance(result, str)}
        if not wrong and len(found) == 1:
            return found.pop()
        await self._discard(engines)
        if wrong:
            raise next((error for error in wrong if isinstance(error, InvalidRequest)), wrong[0])
        if not found:
            raise self._none_lives()
        raise InvalidRequest(f"the weights stay as they are: the files of {model} changed meanwhile", "model_path")

    @staticmethod
    async def _discard(engines: Sequence[Engine]) -> None:
        await asyncio.gather(*(engine.change_weights("discard") for engine in engines), return_exceptions=True)

    async def _begin(self, engine: Engine) -> None:
        """Give a new engine the plugins and weights that were changed since the start, and what features tell it."""
        if self.on_begin is not None:
            await self.on_begin(engine.call_feature)
        for switching in list(self._switched.values()):
            await engine.switch(*switching)
        given: NewWeights | None = None
        while (wanted := self._weights) is not given and wanted is not None:  # last: nothing is awaited after it
            found = await engine.change_weights("prepare", wanted.model, wanted.load_format)
            if found != wanted.fingerprint:
                raise InvalidRequest(f"the files of {wanted.model} have changed since they were read", "model_path")
            await engine.change_weights("use")
            given = wanted
