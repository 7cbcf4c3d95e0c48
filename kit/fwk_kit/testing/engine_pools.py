"""What every pool of engines must do, over pools below it that answer as the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from fwk.errors import EngineDead, NotServed
from fwk.interfaces.declaration import Facts
from fwk.interfaces.engine_pool import Engine, EnginePool, EnginePoolContext, EnginePoolSpec, Receiver
from fwk.plugins import Registered, build, choose
from fwk.plugins.selection import plugin_options
from fwk.types import EngineReady, EngineStats, Request, SamplingParams, TokenEvent
from fwk_kit.testing.base import PluginSuite, installed

T = TypeVar("T")

SECONDS = 20.0
"""No pool takes that long over engines that answer at once."""


class ScriptedEngine(Engine):
    """Agrees to everything."""

    @property
    def pid(self) -> None:
        return None

    async def call_workers(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        return [None]

    async def call_feature(self, feature: str, operation: str, arguments: Sequence[Any]) -> Any:
        return None


class ScriptedPool(EnginePool):
    """One engine that does what the test says, and notes what it was told."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.engine = ScriptedEngine()
        self.is_running = self._has_started = False
        self._stats = EngineStats()
        self.wrong: str | None = None
        self.receivers: dict[str, Receiver] = {}
        self.told: list[tuple[Any, ...]] = []

    @property
    def has_started(self) -> bool:
        return self._has_started

    @property
    def is_loaded(self) -> bool:
        return True

    @property
    def max_open(self) -> int:
        return 8

    @property
    def stats(self) -> EngineStats:
        return self._stats

    async def start(self) -> None:
        self.is_running = True

    async def wait_ready(self) -> EngineReady:
        assert self.is_running, "wait_ready before start"
        self._has_started = True
        return EngineReady("f", 10, 16, 100, 320, {}, [])

    async def stop(self) -> None:
        self.is_running = False

    async def start_again(self) -> EngineReady:
        await self.start()
        return await self.wait_ready()

    async def close(self) -> None:
        self.is_running = False

    def trouble(self) -> str | None:
        return self.wrong or (None if self.is_running and self.has_started else "it is starting")

    def degraded(self) -> str | None:
        return None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        yield

    def submit(self, request: Request, receiver: Receiver) -> None:
        if (trouble := self.trouble()) is not None:
            raise EngineDead(trouble)
        assert request.request_id not in self.receivers, "a request was submitted twice"
        self.receivers[request.request_id] = receiver

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.told.append(("abort", request_id, index))

    def pause(self, request_id: str, is_on: bool) -> None:
        self.told.append(("pause", request_id, is_on))

    def forget(self, request_id: str) -> None:
        self.receivers.pop(request_id, None)

    @property
    def engines(self) -> Sequence[Engine]:
        return [self.engine] if self.is_running and self.wrong is None else []

    def info(self) -> list[dict[str, Any]]:
        return [{"trouble": self.trouble(), "num_open": len(self.receivers), "stats": {}}]

    def summary(self) -> dict[str, Any]:
        return {}

    def report(self, stats: EngineStats) -> None:
        """The engine has done so much."""
        self._stats = stats
        self.on_stats(stats)

    def die(self) -> None:
        """The engine ends, and with it what it had."""
        self.wrong = "it has died"
        self.on_death(self.wrong)
        receivers, self.receivers = self.receivers, {}
        for receiver in receivers.values():
            receiver(EngineDead(self.wrong))


def request(name: str, n: int = 1) -> Request:
    """A small one."""
    return Request(request_id=name, prompt_token_ids=[1], sampling=SamplingParams(), n=n)


class EnginePoolSuite(PluginSuite):
    """No request is lost or answered twice, what concerns one goes where it is, and engines stop and start again."""

    family = "engine_pools"
    interface = EnginePool

    def pool(self, item: Registered) -> tuple[EnginePool, list[ScriptedPool]]:
        """The plugin's, and the pools below it, in the order in which they were made."""
        made: list[ScriptedPool] = []

        def below(index: int) -> ScriptedPool:
            made.append(ScriptedPool(index))
            return made[-1]

        def chosen(family: str, name: str, context: Callable[..., object], **fields: Any) -> Any:
            other = choose(installed(), family, name, Facts()).chosen
            assert other is not None
            return build(other, context(**fields, options=plugin_options(other, {})))

        context = EnginePoolContext(below=below, choose=chosen, options=self.given(item), model="m", name="m")
        return self.make(item, context), made

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On an event loop of its own, in bounded time."""

        async def bounded() -> T:
            return await asyncio.wait_for(work, SECONDS)

        return asyncio.run(bounded())

    def exercise(self, item: Registered) -> None:
        self.test_is_made_of_as_many_pools_as_it_says(item)

    async def started(self, item: Registered) -> tuple[EnginePool, list[ScriptedPool]]:
        """One whose engines serve."""
        pool, below = self.pool(item)
        await pool.start()
        await pool.wait_ready()
        assert pool.trouble() is None
        assert pool.has_started
        return pool, below

    def test_is_made_of_as_many_pools_as_it_says(self, item: Registered) -> None:
        async def work() -> None:
            assert isinstance(item.declaration, EnginePoolSpec)
            _, below = self.pool(item)
            assert [pool.index for pool in below] == list(range(item.declaration.num_pools(self.given(item))))

        self.run(work())

    def test_every_event_of_a_request_comes_once(self, item: Registered) -> None:
        async def work() -> None:
            pool, below = await self.started(item)
            heard: dict[str, list[Any]] = {f"r{i}": [] for i in range(6)}
            for name, news in heard.items():
                async with pool.use():
                    pool.submit(request(name), news.append)
            placed = {name: one for one in below for name in one.receivers}
            assert placed.keys() == heard.keys(), "a request has reached no engine"
            for name, one in placed.items():
                one.receivers[name]([TokenEvent(name, 0, [5])])
                pool.abort(name, 0)
                pool.pause(name, True)
                assert one.told[-2:] == [("abort", name, 0), ("pause", name, True)]
                pool.forget(name)
                pool.forget(name)
                assert name not in one.receivers, "a request that has ended is not forgotten below"
            assert [len(news) for news in heard.values()] == [1] * len(heard)
            pool.abort("unknown")
            await pool.close()

        self.run(work())

    def test_a_request_that_has_begun_ends_with_its_engine(self, item: Registered) -> None:
        async def work() -> None:
            pool, below = await self.started(item)
            deaths: list[str] = []
            pool.on_death = deaths.append
            news: list[Any] = []
            async with pool.use():
                pool.submit(request("r"), news.append)
            [one] = [one for one in below if one.receivers]
            one.receivers["r"]([TokenEvent("r", 0, [5])])
            one.die()
            assert [type(told) for told in news] == [list, EngineDead]
            assert len(deaths) == 1
            pool.forget("r")
            for other in below:
                if other.wrong is None:
                    other.die()
            assert pool.trouble(), "no engine lives, and the pool says nothing"
            with pytest.raises(EngineDead):
                pool.submit(request("s"), news.append)
            assert list(pool.engines) == []
            await pool.close()

        self.run(work())

    def test_engines_stop_and_start_again(self, item: Registered) -> None:
        async def work() -> None:
            pool, below = await self.started(item)
            assert list(pool.engines) == [one.engine for one in below]
            for is_running in (False, True, False, True):
                await (pool.start_again() if is_running else pool.stop())
                assert [one.is_running for one in below] == [is_running] * len(below)
            assert pool.trouble() is None
            await pool.close()
            assert not any(one.is_running for one in below)

        self.run(work())

    def test_numbers_are_those_of_all_engines(self, item: Registered) -> None:
        async def work() -> None:
            pool, below = await self.started(item)
            told: list[EngineStats] = []
            pool.on_stats = told.append
            for i, one in enumerate(below):
                one.report(EngineStats(num_running=i + 1, steps=100))
            assert told
            total = sum(range(len(below) + 1))
            assert (told[-1].num_running, told[-1].steps) == (total, 100 * len(below))
            assert pool.stats == told[-1]
            assert len(pool.info()) == len(below)
            assert all({"trouble", "num_open", "stats"} <= entry.keys() for entry in pool.info())
            await pool.close()

        self.run(work())

    def test_no_more_are_open_than_it_says(self, item: Registered) -> None:
        async def work() -> None:
            pool, below = await self.started(item)
            counts: list[int] = []
            for _ in range(32):
                opened: list[str] = []
                with contextlib.suppress(NotServed):
                    for i in range(pool.max_open):
                        pool.submit(request(f"r{i}"), lambda news: None)
                        opened.append(f"r{i}")
                assert sum(len(one.receivers) for one in below) == len(opened)
                counts.append(len(opened))
                for name in opened:
                    pool.forget(name)
            assert counts[0]
            assert counts == counts[:1] * len(counts), "a place is not free again when its request has ended"
            await pool.close()

        self.run(work())
