"""Engines that sleep: who waits for whom, and that nobody waits for ever or is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fwk.errors import ConfigError, EngineDead
from fwk.types import EngineReady
from fwk_pools.on_demand.engine_memory import EngineMemory, SleepingModel
from fwk_pools.on_demand.engine_sleep import EngineSleep

READY = EngineReady("f", 10, 16, 100, 320, {}, [])


class Model:
    """Engines that take 10 bytes while they run, and count their starts."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.running: set[Model] = set()
        self.wrong: Exception | None = None
        self.sleep = EngineSleep(self.stop, self.start, lambda: False)
        self.is_up = False

    async def start(self) -> EngineReady:
        await asyncio.sleep(0.001)
        if self.wrong is not None:
            raise self.wrong
        self.num_starts += 1
        self.is_up = True
        return READY

    async def stop(self) -> None:
        assert self.sleep.is_asleep
        self.is_up = False
        await asyncio.sleep(0)

    async def use(self, seconds: float = 0.0) -> None:
        async with self.sleep.awake():
            assert self.is_up
            await asyncio.sleep(seconds)
            assert self.is_up, "nobody stops engines that are used"


async def models(count: int, monkeypatch: pytest.MonkeyPatch, limit: int | None = None) -> list[Model]:
    made = [Model() for _ in range(count)]
    books = [SleepingModel(str(i), model.sleep, list, 0) for i, model in enumerate(made)]
    monkeypatch.setattr(SleepingModel, "num_bytes", 10)
    EngineMemory(books, limit, None)
    for model in made:
        await model.sleep.begin_asleep()
    return made


async def test_all_who_wait_share_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    [model] = await models(1, monkeypatch)
    await asyncio.gather(*(model.use() for _ in range(20)))
    assert model.num_starts == 1
    assert model.sleep.is_idle
    assert await model.sleep.fall_asleep()
    await model.use()
    assert model.num_starts == 2


async def test_what_is_used_does_not_fall_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    [model] = await models(1, monkeypatch)
    async with model.sleep.awake():
        assert not await model.sleep.fall_asleep()
        assert model.is_up
    assert await model.sleep.fall_asleep()


@pytest.mark.parametrize("limit", [10, 20])
async def test_no_use_is_lost_when_models_share_too_little_memory(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    three = await models(3, monkeypatch, limit)
    most = 0

    async def use(i: int) -> None:
        nonlocal most
        await asyncio.sleep(0.0003 * i)
        async with three[i % 3].sleep.awake():
            most = max(most, sum(model.is_up for model in three))
            assert three[i % 3].is_up
            await asyncio.sleep(0.001 * (i % 5))

    await asyncio.wait_for(asyncio.gather(*(use(i) for i in range(200))), 240)
    assert most == limit // 10
    assert min(model.num_starts for model in three) >= 1


async def test_a_busy_model_gives_way_to_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, other = await models(2, monkeypatch, 10)

    async def always() -> None:
        while True:
            await busy.use(0.001)

    crowd = [asyncio.create_task(always()) for _ in range(4)]
    while not busy.num_starts:
        await asyncio.sleep(0.001)
    await asyncio.wait_for(other.use(), 240)
    assert other.num_starts == 1
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert busy.sleep.is_idle or busy.sleep.is_asleep, "those who left are not counted"


async def test_a_start_that_fails_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    [model] = await models(1, monkeypatch)
    model.wrong = ConfigError("no room")
    results = await asyncio.gather(*(model.use() for _ in range(3)), return_exceptions=True)
    assert [(type(result), "no room" in str(result)) for result in results] == [(EngineDead, True)] * 3
    model.wrong = None
    await model.use()


async def test_whoever_leaves_while_waiting_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    [model] = await models(1, monkeypatch)
    waiting: list[asyncio.Task[Any]] = [asyncio.create_task(model.use(60)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await model.use()
    assert await model.sleep.fall_asleep()


async def test_nothing_starts_once_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    [model] = await models(1, monkeypatch)
    waiting = asyncio.create_task(model.use())
    await asyncio.sleep(0)
    await model.sleep.close()
    with pytest.raises(EngineDead, match="stopping"):
        await waiting
    with pytest.raises(EngineDead, match="stopping"):
        await model.use()
    assert model.num_starts == 0
