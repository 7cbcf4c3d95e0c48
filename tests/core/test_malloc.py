"""Freed memory goes back to the system, once after each time of work."""

from __future__ import annotations

import pytest

from fwk.process import malloc as module
from fwk.process.malloc import REST_SECONDS, Heap


def test_memory_goes_back_once_after_each_time_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[float] = []
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    heap = Heap()
    monkeypatch.setattr(heap, "_trim", lambda pad: trimmed.append(now))
    for work, pause in ((0, 5), (3, 1), (3, 0.9), (4, 0.5), (4, REST_SECONDS), (4, 60), (4, 60), (5, 3), (5, 0)):
        heap.rest(work)
        now += pause
    assert trimmed == [100 + 5 + 1 + 0.9 + 0.5 + REST_SECONDS, now]


def test_the_c_library_has_a_way_to_give_it_back() -> None:
    assert Heap()._trim(0) in (0, 1, None)
