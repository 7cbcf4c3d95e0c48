"""Order of the waiting queue under fcfs and lpm."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from fwk.interfaces.schedule import ScheduleContext
from fwk.types import Request, SamplingParams
from fwk_schedulers.fcfs.policy import FirstComeFirstServed
from fwk_schedulers.lpm import LpmOptions
from fwk_schedulers.lpm.policy import LongestPrefixMatch


@dataclass(eq=False)
class Waiting:
    """A sequence as the policies see it; ``cached`` is what the fake prefix cache answers for it."""

    number: int
    cached: int = 0
    num_preemptions: int = 0
    index: int = 0
    arrival: float = 0.0
    num_tokens: int = 100
    num_computed_tokens: int = 0
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        self.request = Request(request_id=str(self.number), prompt_token_ids=[1], sampling=SamplingParams())


@dataclass
class View:
    num_lookups: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 100
    num_free_blocks: int = 100
    block_size: int = 16

    def cached_prefix_len(self, sequence: Any) -> int:
        self.num_lookups += 1
        return sequence.cached


class Endless(Sequence[Waiting]):
    """A queue so long that only a lazy reader gets anywhere."""

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, at: Any) -> Any:
        return Waiting(at, cached=at)

    def __iter__(self) -> Iterator[Waiting]:
        at = 0
        while True:
            yield Waiting(at, cached=at)
            at += 1


def lpm(**options: int) -> LongestPrefixMatch:
    return LongestPrefixMatch(ScheduleContext(LpmOptions(**options)))


def numbers(order: Iterable[Any], count: int = 10**6) -> list[int]:
    return [sequence.number for sequence, _ in zip(order, range(count), strict=False)]


def test_fcfs_keeps_the_order_given() -> None:
    waiting = [Waiting(3), Waiting(1), Waiting(2)]
    policy = FirstComeFirstServed(ScheduleContext())
    assert numbers(policy.order(waiting, View())) == [3, 1, 2]
    assert numbers(policy.order(Endless(), View()), 3) == [0, 1, 2]


def test_lpm_takes_the_longest_prefix_first_and_ties_by_arrival() -> None:
    waiting = [Waiting(0), Waiting(1, cached=32), Waiting(2, cached=64), Waiting(3, cached=32), Waiting(4)]
    assert numbers(lpm().order(waiting, View())) == [2, 1, 3, 0, 4]
    assert numbers(LongestPrefixMatch(ScheduleContext()).order(waiting, View())) == [2, 1, 3, 0, 4]


def test_lpm_leaves_what_is_behind_the_window_in_order_of_arrival() -> None:
    view = View()
    assert numbers(lpm(lpm_window=3).order(Endless(), view), 6) == [2, 1, 0, 3, 4, 5]
    assert view.num_lookups == 3


def test_lpm_does_nothing_until_it_is_read() -> None:
    view = View()
    lpm().order(Endless(), view)
    assert view.num_lookups == 0


def test_lpm_looks_up_few_prefixes_once_it_knows_the_window() -> None:
    policy, view = lpm(), View()
    waiting = [Waiting(i) for i in range(500)]
    numbers(policy.order(waiting, view))
    assert view.num_lookups == 128
    numbers(policy.order(waiting, view))
    assert view.num_lookups == 128 + 8


def test_lpm_notices_within_bounded_passes_that_the_cache_changed() -> None:
    policy, view = lpm(), View()
    waiting = [Waiting(i) for i in range(128)]
    numbers(policy.order(waiting, view))
    waiting[100].cached = 48
    firsts = [numbers(policy.order(waiting, view))[0] for _ in range(128 // 8)]
    assert firsts[-1] == 100


def test_lpm_starts_pre_empted_sequences_first() -> None:
    waiting = [Waiting(5, num_preemptions=1), Waiting(0), Waiting(1, cached=64), Waiting(6, num_preemptions=2)]
    assert numbers(lpm().order(waiting, View())) == [5, 6, 1, 0]


def test_lpm_tells_the_sequences_of_one_request_apart() -> None:
    first, second = Waiting(1), Waiting(1, cached=16, index=1)
    second.request = first.request
    assert [s.index for s in lpm().order([first, second], View())] == [1, 0]


@pytest.mark.parametrize("max_overtakes", [0, 1, 5])
def test_nobody_is_overtaken_for_ever(max_overtakes: int) -> None:
    policy, view = lpm(lpm_max_overtakes=max_overtakes), View()
    waiting = [Waiting(0)] + [Waiting(i, cached=64) for i in range(1, 10)]
    started: list[int] = []
    for step in range(20):
        chosen: Any = next(iter(policy.order(waiting, view)))
        waiting.remove(chosen)
        started.append(chosen.number)
        waiting.append(Waiting(10 + step, cached=64))  # the stream of better matches never ends
    assert started.index(0) == max_overtakes


def test_the_bound_holds_for_every_sequence_of_a_random_stream() -> None:
    rng = random.Random(1)
    policy, view = lpm(lpm_window=16, lpm_max_overtakes=4), View()
    waiting: list[Waiting] = []
    overtakes: dict[int, int] = {}
    for step in range(2000):
        if len(waiting) < 24:
            waiting.append(Waiting(step, cached=rng.choice([0, 0, 16, 512])))
        if rng.random() < 0.7:
            chosen: Any = next(iter(policy.order(waiting, view)))
            for sequence in waiting[: waiting.index(chosen)]:
                overtakes[sequence.number] = overtakes.get(sequence.number, 0) + 1
            waiting.remove(chosen)
    assert max(overtakes.values()) == 4


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValidationError):
        LpmOptions(lpm_window=0)
    with pytest.raises(ValidationError):
        LpmOptions(lpm_max_overtakes=-1)
