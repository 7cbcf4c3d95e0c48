"""Observers are told everything and can hold up nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord
from fwk.server import observer_dispatch
from fwk.server.observer_dispatch import Observers
from fwk.types import EngineStats


class Hearing(Observer):
    """Writes down what it hears, and on which thread."""

    def __init__(self) -> None:
        super().__init__(ObserverContext("m"))
        self.heard: list[Any] = []
        self.threads: set[int] = set()

    def request_arrived(self, record: RequestRecord) -> None:
        self.heard.append(("arrived", record))
        self.threads.add(threading.get_ident())

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        self.heard.append((record.num_output_tokens, num_tokens, seconds))

    def request_finished(self, record: RequestRecord) -> None:
        self.heard.append(("finished", record))

    def step_finished(self, stats: EngineStats) -> None:
        self.heard.append(stats.steps)

    def engine_died(self, reason: str) -> None:
        self.heard.append(reason)

    def close(self) -> None:
        self.heard.append("closed")


class Blocking(Observer):
    """Waits in its first call until it is let go."""

    def __init__(self) -> None:
        super().__init__(ObserverContext("m"))
        self.gate = threading.Event()
        self.heard: list[int] = []

    def step_finished(self, stats: EngineStats) -> None:
        self.gate.wait(60)
        self.heard.append(stats.steps)


class Raising(Observer):
    def __init__(self) -> None:
        super().__init__(ObserverContext("m"))

    def request_arrived(self, record: RequestRecord) -> None:
        raise ZeroDivisionError


def record() -> RequestRecord:
    return RequestRecord("r", "", 3, 1.0)


async def test_everything_is_told_in_order_on_a_thread_of_its_own() -> None:
    observers, hearing = Observers(), Hearing()
    listener = observers.add(hearing, "observers.hearing")
    mine = record()
    observers.request_arrived(mine)
    for i in range(1, 500):
        mine.num_output_tokens = i
        observers.tokens_received(mine, 1, 0.5)
    observers.request_finished(mine)
    observers.step_finished(EngineStats(steps=7))
    observers.engine_died("killed")
    await listener.settle()
    observers.close()
    assert [entry[0] for entry in hearing.heard[:2]] == ["arrived", 1]
    assert hearing.heard[0][1].num_output_tokens == 0, "a record is as it was then"
    assert hearing.heard[1:500] == [(i, 1, 0.5) for i in range(1, 500)]
    assert hearing.heard[500] == ("finished", mine)
    assert hearing.heard[501:] == [7, "killed", "closed"]
    assert hearing.threads.isdisjoint({threading.get_ident()})


async def test_a_blocking_observer_blocks_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer_dispatch, "MAX_EVENTS", 1000)
    observers, blocking, hearing = Observers(), Blocking(), Hearing()
    observers.add(blocking, "observers.blocking")
    other = observers.add(hearing, "observers.hearing")
    longest = 0.0
    for i in range(900):
        started = time.perf_counter()
        observers.step_finished(EngineStats(steps=i))
        longest = max(longest, time.perf_counter() - started)
        if i % 100 == 0:
            await asyncio.sleep(0)
    await other.settle()
    assert hearing.heard == list(range(900))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for i in range(900, 1200):
            observers.step_finished(EngineStats(steps=i))
            await asyncio.sleep(0)
    assert longest < 2, "a call that waits for the observer takes a minute"
    warnings = [entry.getMessage() for entry in caplog.records]
    assert len(warnings) == 1
    assert "observers.blocking is too slow (1000 events wait for it)" in warnings[0]
    await other.settle()
    assert hearing.heard == list(range(1200))
    blocking.gate.set()
    observers.close()
    assert blocking.heard[:2] == [0, 1]
    assert blocking.heard[-1] == 1199, "the last state comes through"
    assert 1000 <= len(blocking.heard) < 1200


async def test_an_observer_that_fell_behind_comes_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer_dispatch, "MAX_EVENTS", 100)
    observers, hearing = Observers(), Hearing()
    gate = threading.Event()
    monkeypatch.setattr(hearing, "request_arrived", lambda record: gate.wait(60))
    listener = observers.add(hearing, "observers.hearing")
    mine = record()
    observers.request_arrived(mine)
    for _ in range(1000):  # a stream of many sequences whose tokens come at once
        observers.tokens_received(mine, 1, 0.5)
    observers.request_finished(mine)
    observers.step_finished(EngineStats(steps=1))
    gate.set()
    for _ in range(500):
        await asyncio.sleep(0.01)
        if not listener.is_late:
            break
    assert 850 < observers.missed()["observers.hearing"] <= 901, "tokens, and nothing else"
    assert hearing.heard[-2:] == [("finished", mine), 1]
    assert "has caught up; it has missed" in caplog.text
    observers.tokens_received(mine, 7, 0.5)
    await listener.settle()
    assert hearing.heard[-1] == (0, 7, 0.5)
    observers.close()


async def test_a_call_that_takes_too_long_is_noticed_with_little_to_tell(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer_dispatch, "SLOW_SECONDS", 0.1)
    observers, blocking = Observers(), Blocking()
    listener = observers.add(blocking, "observers.blocking")
    observers.step_finished(EngineStats())
    for _ in range(100):
        await asyncio.sleep(0.02)
        observers.step_finished(EngineStats())
        if listener.is_late:
            break
    assert listener.is_late
    assert "observers.blocking is too slow (a call of it takes more than 0.1 seconds)" in caplog.text
    started = time.monotonic()
    await listener.settle()
    observers.close()
    assert time.monotonic() - started < 1
    blocking.gate.set()


async def test_an_observer_that_raises_is_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    observers, hearing = Observers(), Hearing()
    observers.add(Raising(), "observers.raising")
    observers.add(hearing, "observers.hearing")
    for _ in range(5):
        observers.request_arrived(record())
    observers.close()
    assert caplog.text.count("observer observers.raising raised and is notified no more") == 1
    assert len(hearing.heard) == 6


async def test_an_observer_that_does_not_close_is_left_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer_dispatch, "CLOSE_SECONDS", 0.1)
    observers, blocking = Observers(), Blocking()
    observers.add(blocking, "observers.blocking")
    observers.step_finished(EngineStats())
    await asyncio.to_thread(observers.close)
    assert "observers.blocking does not close within 0.1 seconds" in caplog.text
    blocking.gate.set()


def test_what_nobody_hears_costs_nothing() -> None:
    observers = Observers()
    blocking = Blocking()
    blocking.gate.set()
    listener = observers.add(blocking, "observers.blocking")
    assert listener.hears == {"step_finished"}
    observers.tokens_received(None, 1, 0.0)  # type: ignore[arg-type]  # not even looked at
    observers.remove(listener)
    observers.step_finished(EngineStats())
    listener.close()
    assert not blocking.heard


def test_headers_are_for_those_that_want_them() -> None:
    observers = Observers()
    one, other = Hearing(), Hearing()
    one.wants_headers = frozenset({"x-team", "authorization", "cookie"})
    for observer in (one, other):
        observers.add(observer, "o")
    assert observers.wanted_headers == {"x-team"}, "keys are for none"
    observers.request_arrived(RequestRecord("id", "", 1, 0.0, headers={"x-team": "a"}))
    observers.close()
    heard = [observer.heard[0][1].headers for observer in (one, other)]
    assert heard == [{"x-team": "a"}, {}]
