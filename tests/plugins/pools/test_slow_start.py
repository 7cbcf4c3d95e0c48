"""Slow start: which share of requests a replica that has come back is offered."""

from __future__ import annotations

from fwk_pools.replicas.slow_start import SlowStart


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ejected(seconds: float, clock: Clock) -> SlowStart:
    """Of three replicas the last comes back."""
    start = SlowStart(3, seconds, clock)
    start.note([True, True, False])
    start.note([True, True, True])
    return start


def shares(start: SlowStart, times: int) -> list[int]:
    offers = [start.offered([0, 1, 2]) for _ in range(times)]
    return [sum(index in offered for offered in offers) for index in range(3)]


def test_the_share_grows_from_a_tenth_to_all() -> None:
    clock = Clock()
    start = ejected(10.0, clock)
    assert shares(start, 100) == [100, 100, 10]
    clock.now += 5
    assert shares(start, 100) == [100, 100, 50]
    clock.now += 5
    assert shares(start, 100) == [100, 100, 100]
    assert start.weight(2) == 1.0


def test_the_first_request_tries_it() -> None:
    assert ejected(10.0, Clock()).offered([0, 1, 2]) == [0, 1, 2]


def test_one_that_fails_again_begins_anew() -> None:
    clock = Clock()
    start = ejected(10.0, clock)
    clock.now += 9
    start.note([True, True, False])
    assert start.weight(2) == 0.0
    start.note([True, True, True])
    assert start.weight(2) == 0.1


def test_those_that_never_failed_have_full_weight() -> None:
    start = SlowStart(3, 10.0, Clock())
    start.note([True, True, True])
    assert shares(start, 10) == [10, 10, 10]


def test_without_others_it_serves_all() -> None:
    start = ejected(10.0, Clock())
    assert [start.offered([2]) for _ in range(20)] == [[2]] * 20


def test_zero_seconds_is_at_once() -> None:
    assert shares(ejected(0.0, Clock()), 10) == [10, 10, 10]
