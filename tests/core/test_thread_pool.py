"""The threads that run native operators."""

from __future__ import annotations

import ctypes
import json
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.helpers.rig import until
from tests.helpers.tiny import TINY

import fwk_native as native
from fwk.interfaces.operators import OperatorContext
from fwk_native.thread_pool import Tape, ThreadPool, operator

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

SOURCE = """
#include <time.h>

#include "fwk/thread_pool.h"

template <class F>
bool until(F f) {  // for 20 seconds at the most
    for (int i = 0; i < 20000; i++) {
        if (f()) return true;
        usleep(1000);
    }
    return false;
}

extern "C" {

struct Count { int64_t n; int32_t* taken; int64_t* sum; int32_t* seen; };

// Each chunk adds up what all of the call before have marked.
void add_up(const Count& a, fwk::PoolThread& m) {
    m.parallel_for(8, [&](int64_t k) {
        int64_t sum = 0;
        for (int64_t i = 0; i < a.n; i++) sum += a.taken[i];
        a.sum[k] = sum;
        a.seen[k]++;
    });
}

// Every chunk marks itself.
void count(const void* args, fwk::PoolThread& m) {
    const Count& a = *(const Count*)args;
    m.parallel_for(a.n, [&](int64_t i) { a.taken[i]++; });
    add_up(a, m);
}

// And so does every chunk that is the one told of before.
void count_in_order(const void* args, fwk::PoolThread& m) {
    const Count& a = *(const Count*)args;
    int64_t expected = -1;
    m.parallel_for_ordered(a.n, [&](int64_t i, int64_t next) {
        const bool is_right = m.size > 2 || expected < 0 || i == expected;
        if (is_right && next >= 0 && next < a.n) a.taken[i]++;
        expected = next;
        sched_yield();
    });
    add_up(a, m);
}

struct Step { int64_t n; const int64_t* from; int64_t* to; };

// Each chunk reads what the operator before wrote into another chunk.
void shift(const void* args, fwk::PoolThread& m) {
    const Step& a = *(const Step*)args;
    m.parallel_for(a.n, [&](int64_t i) { a.to[i] = a.from[(i + 1) % a.n] + 1; });
}

void increase(const void* args, fwk::PoolThread& m) {
    const Step& a = *(const Step*)args;
    m.parallel_for(a.n, [&](int64_t i) { a.to[i]++; });
}

struct Mix { int64_t n, width, calls; uint64_t seed; const uint64_t* from; uint64_t* to; };

uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15;
    return (x ^ x >> 29) * 0xbf58476d1ce4e5b9;
}

// Lose some time, as a thread does that loses its core: mostly none, now and then much.
void lose_time(uint64_t x) {
    x = mixed(x) >> 32;
    if (x % 4 == 0) sched_yield();
    if (x % 16 == 1) usleep(x / 16 % 100);
    if (x % 8 == 2) for (volatile int i = 0; i < int(x / 16 % 20000); i = i + 1) {}
}

// Every chunk reads all that was written before and adds to what is there: done twice, early or late it shows.
void mix(const void* args, fwk::PoolThread& m) {
    const Mix& a = *(const Mix*)args;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t luck = a.seed + m.index * 77 + now.tv_nsec;
    lose_time(luck++);
    for (int64_t call = 0; call < a.calls; call++) {
        const uint64_t* from = call % 2 ? a.to : a.from;
        uint64_t* to = (call % 2 ? (uint64_t*)a.from : a.to);
        const auto one = [&](int64_t i, int64_t) {
            lose_time(luck++);
            uint64_t sum = a.seed;
            for (int64_t k = 0; k < a.width; k++) sum = mixed(sum + from[k]);
            lose_time(luck++);
            to[i] = mixed(to[i] + sum);
        };
        if ((a.seed + call) % 2) m.parallel_for_ordered(a.n, one);
        else m.parallel_for(a.n, [&](int64_t i) { one(i, i); });
        lose_time(luck++);
    }
}

struct Late { int32_t has_come, is_over, was_waited_for, has_left; };

// PoolThread 1 comes, and is late until the tape is over.
void straggle(const void* args, fwk::PoolThread& m) {
    Late& a = *(Late*)args;
    if (m.index == 1) {
        __atomic_store_n(&a.has_come, 1, __ATOMIC_SEQ_CST);
        a.was_waited_for = !until([&] { return __atomic_load_n(&a.is_over, __ATOMIC_SEQ_CST); });
        usleep(50000);
        a.has_left = 1;
    }
    m.parallel_for(4, [&](int64_t) { until([&] { return __atomic_load_n(&a.has_come, __ATOMIC_SEQ_CST); }); });
}

void finish(const void* args, fwk::PoolThread& m) {
    m.parallel_for(1, [&](int64_t) { __atomic_store_n(&((Late*)args)->is_over, 1, __ATOMIC_SEQ_CST); });
}

// One chunk takes long.
void doze(const void* args, fwk::PoolThread& m) {
    m.parallel_for(1, [&](int64_t) { usleep(*(const int64_t*)args); });
}

}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("threads") / "sample.cpp"
    path.write_text(SOURCE)
    return native.load(path, "plain")


class Count(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("taken", "sum", "seen"))]


class Step(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int64), ("from_", ctypes.c_void_p), ("to", ctypes.c_void_p)]


class Mix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "width", "calls")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("from_", "to")),
    ]


class Late(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("has_come", "is_over", "was_waited_for", "has_left")]


class Pause(ctypes.Structure):
    _fields_ = [("microseconds", ctypes.c_int64)]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 3, 1000])
@pytest.mark.parametrize("name", ["count", "count_in_order"])
def test_each_chunk_is_taken_once_and_seen_by_all(library: ctypes.CDLL, name: str, size: int, n: int) -> None:
    taken, sums, seen = (ctypes.c_int32 * max(n, 1))(), (ctypes.c_int64 * 8)(), (ctypes.c_int32 * 8)()
    args = Count(n, *map(ctypes.addressof, (taken, sums, seen)))
    threads = ThreadPool(size)
    for turn in range(1, 20):
        threads.run(operator(library, name), args)
        assert list(taken[:n]) == [turn] * n
        assert list(sums) == [turn * n] * 8
        assert list(seen) == [turn] * 8


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_tape_runs_operators_one_after_the_other(library: ctypes.CDLL, size: int) -> None:
    n, length = 7, 300
    buffers = [(ctypes.c_int64 * n)(), (ctypes.c_int64 * n)()]
    threads, tape = ThreadPool(size), Tape()
    threads.tape = tape
    for i in range(length):
        ends = (buffers[i % 2], buffers[(i + 1) % 2])
        threads.run(operator(library, "shift"), Step(n, *map(ctypes.addressof, ends)), is_small=i % 3 == 0)
    threads.tape = None
    assert list(buffers[0]) == [0] * n  # they are recorded instead of run
    assert len(tape) == length
    for turn in range(1, 8):
        threads.replay(tape)
        assert list(buffers[0]) == [turn * length] * n
    threads.run(operator(library, "shift"), Step(n, *map(ctypes.addressof, buffers)))
    assert len(tape) == length


def _mixed(library: ctypes.CDLL, size: int, turns: int) -> list[list[int]]:
    """What two buffers hold after each turn of a tape of operators of all shapes, with regions of one in between."""
    rng, width, threads, tape = random.Random(0), 9, ThreadPool(size), Tape()
    buffers = [(ctypes.c_uint64 * width)(), (ctypes.c_uint64 * width)()]
    ends = [ctypes.addressof(buffer) for buffer in buffers]
    op = operator(library, "mix")
    for _ in range(40):
        rng.shuffle(ends)
        tape.append(op, Mix(rng.randrange(width + 1), width, rng.randrange(4), rng.randrange(2**32), *ends))
    alone = Mix(width, width, 2, 7, *ends)
    seen: list[list[int]] = []
    for turn in range(turns):
        threads.replay(tape)
        if turn % 3 == 0:
            threads.run(op, alone)
        seen.append([*buffers[0], *buffers[1]])
    return seen


@pytest.mark.gate(1)
@pytest.mark.parametrize("size", [2, 5])
def test_threads_that_lose_their_cores_change_nothing(library: ctypes.CDLL, size: int) -> None:
    turns = 15
    assert _mixed(library, size, turns) == _mixed(library, 1, turns)


@pytest.mark.parametrize("size", [2, 5])
def test_a_member_without_a_chunk_is_not_waited_for(library: ctypes.CDLL, size: int) -> None:
    """It is late from the first operator on until the last one runs, which would not if somebody waited for it.

    The tape's arguments are its to read until it has left.
    """
    late, numbers = Late(), (ctypes.c_int64 * 2)()
    step, tape = Step(1, *[ctypes.addressof(numbers)] * 2), Tape()
    tape.append(operator(library, "straggle"), late)
    for _ in range(20):
        tape.append(operator(library, "shift"), step)
    tape.append(operator(library, "finish"), late)
    ThreadPool(size).replay(tape)
    assert (late.has_come, late.is_over, late.was_waited_for, late.has_left) == (1, 1, 0, 1)
    assert numbers[0] == 20


def test_a_long_chunk_is_waited_for_asleep(library: ctypes.CDLL) -> None:
    """The others give their cores away: two members that wait 0.6 s take a small part of that."""
    threads, args = ThreadPool(3), Pause(600_000)
    threads.run(operator(library, "doze"), Pause(0))
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    threads.run(operator(library, "doze"), args)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert time.monotonic() - started >= 0.6
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


def test_an_idle_team_uses_no_cpu(library: ctypes.CDLL) -> None:
    threads = ThreadPool(2)
    threads.run(operator(library, "doze"), Pause(0))
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


def test_threads_end_with_their_team(library: ctypes.CDLL) -> None:
    def names() -> set[str]:
        return {entry.name for entry in Path("/proc/self/task").iterdir()}

    before, threads = names(), ThreadPool(4)
    threads.run(operator(library, "doze"), Pause(0))
    own = names() - before
    assert len(own) == 3
    del threads
    until(lambda: not own & names(), 20, "the thread pool's threads have ended")


def test_several_threads_may_use_a_team(library: ctypes.CDLL) -> None:
    """Their operators come one after the other."""
    threads, n = ThreadPool(2), 50
    numbers = [(ctypes.c_int64 * n)() for _ in range(3)]
    steps = [Step(n, *[ctypes.addressof(own)] * 2) for own in numbers]

    def work(step: Step) -> None:
        for _ in range(100):
            threads.run(operator(library, "increase"), step)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, steps))
    assert [list(own) for own in numbers] == [[100] * n] * 3


@pytest.mark.sweep
def test_cpu_threads_are_torchs_and_the_teams(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    code = (
        "import fwk, torch\n"
        f"with fwk.LLM({str(tmp_path)!r}, load_format='dummy', cpu_threads=3) as llm:\n"
        "    print(torch.get_num_threads(), llm.engine.executor._worker._builder.threads.size)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "3"]


def test_a_context_without_threads_says_what_is_missing() -> None:
    context = OperatorContext(torch.device("cpu"), torch.float32)
    assert context.threads.size == 1
    with pytest.raises(RuntimeError, match=r"has no threads .* threads=fwk_native\.thread_pool\.ThreadPool\(\)"):
        context.threads.run(0, None)
