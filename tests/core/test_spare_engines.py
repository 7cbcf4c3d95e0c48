"""Processes that wait for an engine to die."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fwk.server import spare_engines
from fwk.server.spare_engines import SpareEngines


class Process:
    """One that imports at once."""

    made: list[Process]

    def __init__(self, num_engines: int) -> None:
        self.has_ended = self.is_discarded = False
        self.num_engines = num_engines
        Process.made.append(self)

    def discard(self) -> None:
        self.is_discarded = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    Process.made = []
    monkeypatch.setattr(spare_engines, "EngineProcess", Process)
    monkeypatch.setattr(spare_engines, "PAUSE", 0.001)


def spares(wanted: int | None, *, is_watched: bool = True) -> SpareEngines:
    server: Any = SimpleNamespace(spare_engines=wanted, health_monitor=is_watched)
    config: Any = SimpleNamespace(server=server)
    return SpareEngines(config, 2)


async def prepared(pool: SpareEngines, is_busy: bool = False) -> int:
    pool.prepare(lambda: is_busy)
    await asyncio.sleep(0.02)
    return len(Process.made)


async def test_one_waits_for_each_that_is_taken() -> None:
    pool = spares(1)
    assert pool.take() is None, "not before an engine serves"
    assert await prepared(pool) == 1
    assert await prepared(pool) == 1
    process: Any = pool.take()
    assert (process, process.num_engines) == (Process.made[0], 2)
    assert await prepared(pool) == 2
    Process.made[1].has_ended = True
    assert pool.take() is None, "one that has died is of no use"
    assert Process.made[1].is_discarded
    assert await prepared(pool) == 3
    pool.close()
    assert [process.is_discarded for process in Process.made] == [False, True, True]


async def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await prepared(spares(0)) == 0
    assert await prepared(spares(2, is_watched=False)) == 0, "a dead engine stays dead"
    monkeypatch.setattr(spare_engines, "available_memory", lambda: 2**30)
    assert await prepared(spares(None)) == 0, "too little memory is left"
    assert await prepared(spares(2)) == 2, "as it was asked for"


async def test_it_comes_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = spares(1)
    assert await prepared(pool, is_busy=True) == 0
    pool.close()
    monkeypatch.setattr(spare_engines, "MAX_PAUSES", 3)
    assert await prepared(spares(1), is_busy=True) == 1, "or late"
