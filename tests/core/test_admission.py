"""The admission: how many are let in, and how many at a time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from fwk.config import ServerOptions
from fwk.errors import NotServed
from fwk_http.admission import STEPS_IN, AdmissionController


async def turns(admission: AdmissionController, count: int) -> list[list[int]]:
    """Who comes in, turn of the event loop by turn, when that many come at once."""
    inside: list[int] = []

    async def one(number: int) -> None:
        await admission.enter()
        inside.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    seen: list[list[int]] = []
    while not all(task.done() for task in tasks):
        before = len(inside)
        await asyncio.sleep(0)
        seen.append(inside[before:])
    return [turn for turn in seen if turn]


async def test_who_comes_alone_does_not_wait() -> None:
    admission = AdmissionController(ServerOptions(), 10)
    for _ in range(3):
        entering = admission.enter()
        with pytest.raises(StopIteration):  # it ends without ever waiting for anything
            entering.send(None)
        await asyncio.sleep(0.001)


async def test_a_crowd_comes_in_few_at_a_time_and_in_order() -> None:
    seen = await turns(AdmissionController(ServerOptions(), 1000), 10 * STEPS_IN)
    assert list(itertools.chain(*seen)) == list(range(10 * STEPS_IN))
    assert max(map(len, seen)) <= STEPS_IN
    assert len(seen) <= 12, "no turn is lost"


async def test_no_more_than_may_run_or_wait() -> None:
    admission = AdmissionController(ServerOptions(), 5)
    results = await asyncio.gather(*(admission.enter() for _ in range(8)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, NotServed)]
    assert [(error.status, error.retry_after) for error in refused] == [(429, 1)] * 3
    admission.leave()
    await admission.enter()


async def test_who_leaves_the_line_takes_no_turn() -> None:
    admission = AdmissionController(ServerOptions(), 1000)
    tasks = [asyncio.create_task(admission.enter()) for _ in range(4 * STEPS_IN)]
    await asyncio.sleep(0)
    for task in tasks[STEPS_IN : 3 * STEPS_IN]:
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks[3 * STEPS_IN :]] == [True] * STEPS_IN
    for _ in range(2 * STEPS_IN):
        admission.leave()
    await asyncio.wait_for(admission.empty(), 1)
