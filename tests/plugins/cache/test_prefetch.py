"""Entries of slow tiers, read while sequences wait: no step waits for them, and each policy holds what it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.helpers.dict_tier import DictTier
from tests.helpers.engine_machine import assert_idle, request, run
from tests.helpers.tiered import Tiered

from fwk.engine.core import Engine
from fwk.engine.gate import MAX_OPEN
from fwk.engine.sequence import Sequence as WaitingSequence
from fwk.interfaces.feature import EnginePartContext
from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext
from fwk.types import GrammarRequest, Request, SamplingParams
from fwk_cache.host import HostOptions
from fwk_cache.host.tier import HostTier
from fwk_grammar.grammar_masks.engine import GrammarGate
from fwk_kit.testing.fake_engine import VOCAB, make_engine, reference

PROMPT = [(7 * i) % VOCAB for i in range(41)]
"""Ten blocks of four, and a token to compute."""
OTHER = [(5 * i + 1) % VOCAB for i in range(41)]


class SlowTier(DictTier):
    """Lets as many reads through as ``allow`` was called for; ``get`` is for steps, and there should be none."""

    def __init__(self, context: CacheTierContext) -> None:
        super().__init__(context)
        self.reads = threading.Semaphore(0)
        self.num_read = 0
        self.num_got = 0
        self.is_away = False

    def get(self, key: bytes, into: memoryview) -> bool:
        self.num_got += 1
        return super().get(key, into)

    def reader(self) -> Callable[[bytes, memoryview], bool]:
        return self._read

    def _read(self, key: bytes, into: memoryview) -> bool:
        self.reads.acquire()
        if self.is_away:
            raise OSError("the tier is away")
        found = super().get(key, into)
        self.num_read += 1
        return found

    def allow(self, count: int) -> None:
        self.reads.release(count)


Made = tuple[Any, SlowTier]


@pytest.fixture
def make() -> Iterator[Callable[..., Made]]:
    """An engine whose host tier is empty, and a slow tier that has all of ``PROMPT``."""
    opened: list[Any] = []

    def made(policy: str, places: int = 100, timeout: float = 2.0, prompts: Sequence[list[int]] = (PROMPT,)) -> Made:
        slow: list[SlowTier] = []

        def tiers(context: CacheTierContext) -> list[CacheTier]:
            options = HostOptions(hicache_ratio=places / context.num_blocks)
            host = HostTier(CacheTierContext(context.num_blocks, context.block_bytes, bytes(32), options=options))
            if not slow:
                slow.append(SlowTier(context))
            return [host, slow[0]]

        options = {"hicache_storage_prefetch_policy": policy, "hicache_storage_prefetch_timeout": timeout}

        def engine() -> Any:
            opened.append(make_engine(cache="hierarchical", tiers=Tiered(tiers), cache_options=options, num_blocks=64))
            return opened[-1]

        writes = engine()
        slow[0].allow(len(prompts))
        for i, prompt in enumerate(prompts):
            writes.add(request(str(i), prompt, max_tokens=1))
        run(writes)
        opened.pop().executor.worker.store.close()
        slow[0].reads, slow[0].num_read = threading.Semaphore(0), 0
        return engine(), slow[0]

    yield made
    for engine in opened:
        engine.executor.worker.store.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def finished(engine: Engine, seconds: float = 10) -> dict[str, list[int]]:
    """What ends while the engine works, until it has nothing left or the time is over."""
    found: dict[str, list[int]] = {}
    end = time.monotonic() + seconds
    while engine.has_work and time.monotonic() < end:
        for event in engine.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
    return found


def test_a_request_waits_for_all_of_it_and_no_other_does(make: Callable[..., Made]) -> None:
    engine, slow = make("wait_complete")
    engine.add(request("a", PROMPT, max_tokens=3))
    engine.add(request("b", [1, 2, 3], max_tokens=3))
    slow.allow(5)
    assert finished(engine, 0.3) == {"b": reference([1, 2, 3], 3)}
    assert engine.stats().num_waiting == 1
    slow.allow(100)
    assert finished(engine) == {"a": reference(PROMPT, 3)}
    assert engine.stats().restored_prompt_tokens == 40
    assert slow.num_got == 0
    assert_idle(engine)


def test_a_request_waits_for_none_of_it(make: Callable[..., Made]) -> None:
    """What has arrived when it starts is used."""
    engine, slow = make("best_effort")
    slow.allow(3)
    engine.add(request("a", PROMPT, max_tokens=3))
    wait_for(lambda: slow.num_read == 3)
    assert finished(engine) == {"a": reference(PROMPT, 3)}
    assert engine.stats().restored_prompt_tokens == 12
    slow.allow(100)
    assert slow.num_got == 0
    assert_idle(engine)


def test_a_request_waits_until_it_has_waited_long_enough(make: Callable[..., Made]) -> None:
    engine, slow = make("timeout", timeout=0.2)
    slow.allow(4)
    engine.add(request("a", PROMPT, max_tokens=3))
    started = time.monotonic()
    assert finished(engine) == {"a": reference(PROMPT, 3)}
    assert time.monotonic() - started >= 0.2
    assert engine.stats().restored_prompt_tokens == 16
    slow.allow(100)
    assert slow.num_got == 0


def test_what_the_host_has_is_not_read(make: Callable[..., Made]) -> None:
    engine, slow = make("wait_complete")
    slow.allow(100)
    engine.add(request("a", PROMPT, max_tokens=1))
    finished(engine)
    assert slow.num_read == 10
    engine.add(request("b", [*PROMPT[:24], *range(30)], max_tokens=1))
    finished(engine)
    assert slow.num_read == 11  # the first block of its own, which is nowhere


def test_without_room_in_the_host_steps_read_as_before(make: Callable[..., Made]) -> None:
    engine, slow = make("best_effort", places=0)
    engine.add(request("a", PROMPT, max_tokens=3))
    assert finished(engine) == {"a": reference(PROMPT, 3)}
    assert engine.stats().restored_prompt_tokens == 40
    assert (slow.num_got, slow.num_read) == (10, 0)


def test_no_more_is_read_than_the_host_keeps(make: Callable[..., Made]) -> None:
    """Two prompts of ten blocks do not push each other out of twelve places: one is read once the other has started."""
    engine, slow = make("wait_complete", places=12, prompts=[PROMPT, OTHER])
    slow.allow(1000)
    engine.add(request("a", PROMPT, max_tokens=1))
    engine.add(request("b", OTHER, max_tokens=1))

    wait_for(lambda: slow.num_read == 12)
    time.sleep(0.02)
    assert slow.num_read == 12
    finished(engine)
    assert engine.stats().restored_prompt_tokens == 80


def test_requests_that_end_while_they_wait(make: Callable[..., Made]) -> None:
    engine, slow = make("wait_complete")
    for i in range(MAX_OPEN + 8):
        engine.add(request(str(i), [i, *PROMPT[1:]], max_tokens=3))
    finished(engine, 0.05)
    for i in range(MAX_OPEN + 8):
        engine.abort(str(i))
    engine.add(request("a", PROMPT, max_tokens=3))
    slow.allow(1000)
    assert finished(engine) == {"a": reference(PROMPT, 3)}
    assert_idle(engine)


def test_a_reader_that_raises_is_a_miss(make: Callable[..., Made], caplog: pytest.LogCaptureFixture) -> None:
    engine, slow = make("wait_complete")
    slow.is_away = True
    slow.allow(100)
    for name in ("a", "b"):
        engine.add(request(name, [*PROMPT, 1] if name == "a" else [2, *PROMPT], max_tokens=3))
        assert len(finished(engine)[name]) == 3
    assert sum("failed to read ahead" in record.message for record in caplog.records) == 1


def test_many_that_are_ready_do_not_keep_another_from_becoming_so() -> None:
    """A gate prepares for so many at a time; one that comes before them in the queue is prepared for all the same."""
    context = EnginePartContext("x", lambda name, *args: [[True] * len(args[0])] if name == "ready" else [0])
    gate = GrammarGate(context)
    params = SamplingParams(max_tokens=1, grammar=GrammarRequest("regex", "a"))
    for i in range(MAX_OPEN + 1):
        gate.poll()
        assert gate.lets_through(
            WaitingSequence(Request(request_id=str(i), prompt_token_ids=[1], sampling=params), 0, i, 0.0)
        )
    assert not gate.is_full
